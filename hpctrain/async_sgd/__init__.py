"""Asynchronous training: parameter servers, Hogwild and sharded embeddings."""

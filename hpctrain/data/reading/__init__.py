"""Shards opened for reading."""

"""Batch jobs: their text, their submission, what can be wrong with them."""

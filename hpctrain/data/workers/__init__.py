"""Processes that transform batches."""

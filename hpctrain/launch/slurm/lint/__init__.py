"""Checks of a batch script, before it waits in a queue."""

"""Checks of a machine, and of the ranks on it."""

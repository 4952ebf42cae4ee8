"""Copies of a data set on a node."""

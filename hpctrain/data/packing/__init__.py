"""Kinds of sources of data sets, one file per kind."""

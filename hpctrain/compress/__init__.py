"""Codecs of buckets, one per file."""

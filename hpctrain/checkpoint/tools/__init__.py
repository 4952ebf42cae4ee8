"""Tools for checkpoints: describe, verify, compare, export, prune."""

"""Tools for checkpoints: verify, compare, convert, export, prune."""

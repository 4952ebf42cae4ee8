"""What is done to checkpoints: verify, compare, convert, export, prune."""

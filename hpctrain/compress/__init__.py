"""What a bucket travels as: one codec per file."""

"""Between the ranks of a node: memory that all of them map."""

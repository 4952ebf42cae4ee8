"""Communication within a node, through memory that all its ranks map."""

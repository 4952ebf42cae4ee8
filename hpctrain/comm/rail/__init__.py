"""Between nodes: a ring, halving and doubling over the slow link."""

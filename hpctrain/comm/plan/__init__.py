"""The plan: an algorithm for each size; probed, chosen, kept in a file."""

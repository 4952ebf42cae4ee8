"""Which algorithm for which size: probed, chosen, kept in a file."""

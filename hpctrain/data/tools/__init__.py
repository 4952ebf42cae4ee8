"""Tools that describe, verify, repair, split and rewrite data sets."""

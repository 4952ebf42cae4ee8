"""Tools for data sets: faults, repair, description, new shapes."""

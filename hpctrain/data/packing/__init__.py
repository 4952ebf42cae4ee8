"""Sources from which data sets are packed, one module for each kind of source."""

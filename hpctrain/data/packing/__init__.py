"""What data sets are packed from, one file per kind of source."""

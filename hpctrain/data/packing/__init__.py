"""Sources that data sets are packed from, one file per kind."""

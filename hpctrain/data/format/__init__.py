"""Format of data sets on disk: manifest, shards and their writers."""

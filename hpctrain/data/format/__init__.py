"""The format of data sets on disk, and how it is written."""

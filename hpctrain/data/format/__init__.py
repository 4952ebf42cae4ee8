"""What a data set looks like on disk, and how it comes there."""

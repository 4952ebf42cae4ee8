"""Timeline of named operations, as a file that trace viewers open."""

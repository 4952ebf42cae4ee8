"""What named operations did and when, as a file that trace viewers open."""

"""What is wrong with a data set, and what can be saved of it."""

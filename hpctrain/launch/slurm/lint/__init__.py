"""What is wrong with a batch script, before it waits in a queue."""

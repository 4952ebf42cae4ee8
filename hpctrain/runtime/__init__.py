"""The world of this process: init and shutdown, calls of functions, and failures of ranks."""

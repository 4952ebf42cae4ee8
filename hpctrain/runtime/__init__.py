"""The world of this process: init, shutdown, named functions, what happens when a rank fails."""

"""The control code of thousands of ranks in one process, over a simulated network."""

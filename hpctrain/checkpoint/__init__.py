"""Saving and loading what a run needs to go on."""

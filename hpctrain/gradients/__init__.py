"""Averaging of gradients over all ranks in every step."""

"""Gradients that are averaged in every step."""

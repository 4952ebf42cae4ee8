"""Data sets made from others."""

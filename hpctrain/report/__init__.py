"""Figures, pages and tables of runs, studies and comparisons."""

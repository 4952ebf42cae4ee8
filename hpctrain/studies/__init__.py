"""Scaling studies: definition, measurements and analysis."""

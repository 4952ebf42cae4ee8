"""Scaling studies: what to measure, the measurements, and what they say."""

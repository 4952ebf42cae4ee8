"""Checks of a batch script before its submission."""

"""Replicas that agree every few steps."""

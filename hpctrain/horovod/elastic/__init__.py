"""Elastic training: after a failed operation, all ranks continue from the last commit."""

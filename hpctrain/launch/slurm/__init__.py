"""Slurm batch jobs: scripts, submission and checks."""

"""Models of time: what a collective, a step or a run takes on a machine. Pure arithmetic."""

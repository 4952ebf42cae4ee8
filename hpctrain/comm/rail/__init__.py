"""Between nodes: rings, doubling and halving over the slow link."""

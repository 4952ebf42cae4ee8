"""Training loop of ``hpctrain train``, with its run directory."""

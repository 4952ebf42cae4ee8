"""The loop behind ``hpctrain train`` and its run directory."""

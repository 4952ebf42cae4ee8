"""Local SGD methods: ranks take several steps, then average their replicas."""

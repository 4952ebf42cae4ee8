"""What a loader does between an order and a batch."""

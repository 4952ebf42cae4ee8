"""The way from an order to a batch."""

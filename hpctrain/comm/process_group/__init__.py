"""PyTorch's own distributed stack over the communicators of this package."""

"""Moving bytes: communicators from one process to many nodes."""

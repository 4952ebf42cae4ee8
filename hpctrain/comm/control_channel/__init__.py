"""Mailboxes along a tree of ranks: small messages that wake a sleeping receiver."""

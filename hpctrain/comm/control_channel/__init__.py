"""Mailboxes along a tree of ranks: small messages that wake a sleeper and cost nobody a poll."""

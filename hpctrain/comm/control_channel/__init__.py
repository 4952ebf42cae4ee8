"""Mailboxes, which send small control messages between neighbours in a tree of ranks."""

"""The plan: an algorithm for each size, chosen by rule or measurement and stored in a file."""

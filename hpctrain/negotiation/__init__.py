"""Named operations, which ranks submit in any order and execute in the same order."""

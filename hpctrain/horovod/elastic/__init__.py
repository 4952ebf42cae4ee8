"""Training that survives a failed operation: return to the last commit, agree, go on."""

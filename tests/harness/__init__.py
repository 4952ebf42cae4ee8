"""Tests on many ranks: every rank runs pytest, and all ranks agree on each verdict."""

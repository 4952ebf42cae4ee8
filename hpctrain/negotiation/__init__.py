"""Named operations: submitted in any order on any rank, carried out in one order on all."""

"""Test a claim of the tour on all ranks, and print it on rank 0."""

import hpctrain as hvd


def claim(text: str, *, holds: bool) -> None:
    """Print a claim and its result; exit with 1 on all ranks if it is wrong on any rank."""
    holds_everywhere = all(hvd.allgather_object(bool(holds)))
    if hvd.rank() == 0:
        print(f"{'holds' if holds_everywhere else 'FAILS'}: {text}", flush=True)
    if not holds_everywhere:
        raise SystemExit(1)

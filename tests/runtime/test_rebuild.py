"""State that depends on the ranks is rebuilt in a fixed order; failed rebuilds are retried."""

import pytest

from hpctrain.comm import survivors
from hpctrain.runtime.rebuild import Rebuild, RebuildStage


def world_before(calls: list[str], failing: list[str]) -> Rebuild:
    """Return a world with registered moves; each move in ``failing`` fails once."""
    before = Rebuild()

    def move(name: str) -> None:
        calls.append(name)
        if name in failing:
            failing.remove(name)
            raise OSError(name)

    for stage, name in (
        (RebuildStage.HOLDERS, "optimizer"),
        (RebuildStage.RECORDS, "timeline"),
        (RebuildStage.HOLDERS, "sampler"),
        (RebuildStage.SETS, "set"),
    ):
        before.register(stage, move=lambda name=name: move(name))
    return before


def test_a_failed_move_is_retried_and_no_move_runs_twice():
    calls, failing = [], ["set", "sampler"]
    after = Rebuild()
    after.follow(world_before(calls, failing).leave())
    for _ in range(2):
        with pytest.raises(OSError, match=r"set|sampler"):
            after.move()
    after.move()
    assert calls == ["timeline", "set", "set", "optimizer", "sampler", "sampler"]
    after.move()
    assert len(calls) == 6


def test_a_failed_move_is_passed_on_to_the_next_world():
    calls = []
    second = Rebuild()
    second.follow(world_before(calls, ["optimizer"]).leave())
    with pytest.raises(OSError, match="optimizer"):
        second.move()
    second.register(RebuildStage.SETS, move=lambda: calls.append("moved before"))
    third = Rebuild()
    third.follow(second.leave())
    third.move()
    assert calls == ["timeline", "set", "optimizer", "moved before", "optimizer", "sampler"]


class Ranks:
    """Stand in for a communicator of MPI; record the calls that all ranks see."""

    size = 2

    def __init__(self, name: str, calls: list[str]) -> None:
        self.name, self.calls, self.is_revoked = name, calls, False

    def Agree(self, flag: int) -> int:  # noqa: N802 - MPI's name
        self.calls.append(f"agree on {flag}")
        return flag

    def Is_revoked(self) -> bool:  # noqa: N802
        return self.is_revoked

    def Revoke(self) -> None:  # noqa: N802
        self.is_revoked = True
        self.calls.append(f"revoke {self.name}")

    def Shrink(self) -> "Ranks":  # noqa: N802
        return self


def test_a_rank_that_cannot_create_a_world_first_ends_the_waits_of_the_others(monkeypatch):
    monkeypatch.setattr(survivors, "_in_use", [])
    calls = []
    left, inner = Ranks("the survivors", calls), Ranks("a node", calls)

    def make(_: Ranks) -> None:
        survivors.use(inner)  # the other ranks wait in this communicator
        raise OSError("no memory")

    with pytest.raises(OSError, match="no memory"):
        survivors.remake(left, make)
    assert calls == ["agree on 1", "revoke the survivors", "revoke a node", "agree on 0"]

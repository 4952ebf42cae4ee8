"""State that depends on the ranks is rebuilt in a fixed order; failed rebuilds are retried."""

import pytest

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

"""How many steps a round has."""

import pytest

from hpctrain.core.errors import ConfigError
from hpctrain.local_sgd.rounds import SyncInterval
from tests.gradients.training import make_model, sgd
from tests.local_sgd.local_methods import train


@pytest.mark.parametrize("step_s", [1e-3, 0.02, 1.0])
@pytest.mark.parametrize("round_s", [1e-4, 0.03, 5.0])
@pytest.mark.parametrize("share", [0.02, 0.1, 0.5])
def test_auto_takes_the_fewest_steps_that_keep_the_share(step_s, round_s, share):
    pace = SyncInterval("auto", share=share, most=10**6)
    for _ in range(3):
        assert pace.steps_of(0) == 1
        pace.learn(step_s, round_s)
    steps = pace.steps_of(3)

    def part(steps: int) -> float:
        return round_s / (round_s + steps * step_s)

    assert part(steps) <= share * (1 + 1e-9)
    assert steps == 1 or part(steps - 1) > share * (1 - 1e-9)


def test_auto_stays_within_bounds_and_decides_once():
    pace = SyncInterval("auto", least=4, most=16)
    for _ in range(3):
        pace.learn(1.0, 1e-6)
    assert pace.steps_of(3) == 4
    for _ in range(9):
        pace.learn(1e-6, 1.0)
    assert pace.steps_of(12) == 4
    slow = SyncInterval("auto", most=16)
    for _ in range(3):
        slow.learn(1e-6, 1.0)
    assert slow.steps_of(3) == 16


def test_auto_leaves_the_first_round_out_and_goes_on_from_its_state():
    pace = SyncInterval("auto")
    pace.learn(1e-3, 100.0)
    again = SyncInterval("auto")
    again.load_shared_state(pace.shared_state())
    for one in (pace, again):
        one.learn(1e-3, 1e-3)
        one.learn(1e-3, 1e-3)
    assert pace.steps_of(3) == again.steps_of(3) == 9


def test_a_schedule_gives_the_steps_of_each_round():
    pace = SyncInterval(lambda number: 2**number)
    assert [pace.steps_of(number) for number in range(4)] == [1, 2, 4, 8]
    with pytest.raises(ConfigError, match=r"steps\(0\)"):
        SyncInterval(lambda _: 0).steps_of(0)


@pytest.mark.ranks(2, 4)
def test_all_ranks_decide_alike(world, hvd_nodes):
    model = make_model()
    optimizer = sgd(model)
    with hvd_nodes.LocalSGD(model, optimizer, "auto", most=64) as method:
        train(hvd_nodes, model, optimizer, method, 0, 3)
        assert method.facts["rounds"] == 3
        steps = method.facts["steps"]
        train(hvd_nodes, model, optimizer, method, 3, 3 + steps)
        assert method.facts["rounds"] == 4
    assert len(set(world.allgather(steps))) == 1

"""Scripts drawn at random train as replicas of plain torch do, or stop on all ranks alike."""

import pytest

import hpctrain
from tests.gradients.program_oracle import Oracle
from tests.gradients.program_table import PRELUDE, Statement, draw_program
from tests.gradients.programs import check, foretell

NUM_PROGRAMS = 15
"""On each number of ranks; ``make soak`` carries out 500."""


@pytest.mark.ranks(2, 3)
@pytest.mark.parametrize("seed", range(NUM_PROGRAMS))
def test_a_script_trains_as_replicas_of_plain_torch_do(world, seed):
    if hpctrain.is_initialized():
        pytest.fail("on a script before the ranks parted, and left their world behind")
    program = draw_program(seed, world.size)
    kind, said = check(world, program)
    assert not kind, f"{said}\n{program.script(kind)}"


def replicas(*lines, size=2):
    oracle = Oracle(PRELUDE, size, [list(range(size))])
    for line, kind in lines:
        oracle.run(Statement(line, kind))
    return oracle, [names["model"].lone.bias.grad for names in oracle.names]


@pytest.mark.parametrize("op", ["Average", "Sum"])
def test_the_oracle_reduces_once_and_statements_act_on_what_was_reduced(op):
    wrap = f"opt = hvd.DistributedOptimizer(torch.optim.SGD(model.parameters()), op=hvd.{op})"
    made = [("model = Model()", "each"), (wrap, "each")]
    lines = [f"loss_of(model, 'lone', {number}).backward()" for number in (1, 2)]
    local = [replicas(*made, (line, "each"))[1] for line in lines]
    share = 0.5 if op == "Average" else 1.0
    one, two = (share * (a + b) for a, b in local)
    halved = ("model.lone.bias.grad.mul_(0.5)", "each")
    rest = [(lines[0], "backward"), halved, (lines[1], "backward"), ("opt.step()", "step")]
    oracle, found = replicas(*made, *rest)
    for gradient in found:
        assert gradient.allclose(0.5 * one + two, rtol=1e-12)
    assert bool(oracle.may_refuse) == (op == "Sum")


def test_most_scripts_come_to_their_end_and_few_may_be_refused():
    ended = refusable = 0
    for seed in range(NUM_PROGRAMS):
        traces, oracle = foretell(draw_program(seed, 2))
        ended += traces[0].error is None
        refusable += bool(oracle.may_refuse)
    assert ended > 0.6 * NUM_PROGRAMS
    assert refusable < 0.4 * NUM_PROGRAMS

"""Check that random scripts train as replicas of plain torch do, or raise on all ranks."""

import os
import traceback
import warnings
from dataclasses import dataclass, field, replace

import pytest
import torch

import hpctrain
from hpctrain.core.errors import HpctrainError
from tests.gradients.program_oracle import LOOSE, Oracle, RefusedToOneError
from tests.gradients.program_table import PRELUDE, Statement, draw_program
from tests.gradients.program_wraps import dense


@dataclass
class Trace:
    """Hold the result of a script on one rank, or on all replicas: the models, and an error."""

    models: list  # after each statement: parameters and gradients by name
    between_passes: list = field(default_factory=list)
    """After each statement: whether passes have added to reduced gradients, so that no gradient
    is comparable."""
    error: BaseException | None = None
    story: str = ""


def snapshot(model):
    return {
        name: tuple(
            None if one is None else dense(one).detach().to("cpu", copy=True)
            for one in (p, p.grad)
        )
        for name, p in model.named_parameters()
    }


def carry_out(program):
    """Run the script of one rank with hpctrain. Collective."""
    names, trace = {"hvd": hpctrain}, Trace([])
    exec(PRELUDE, names)
    try:
        for statement in program.statements:
            exec(statement.line, names)
            trace.models.append(snapshot(names["model"]) if "model" in names else {})
    except Exception as error:
        trace.error, trace.story = error, traceback.format_exc()
        trace.error.__traceback__ = None
    return trace


def foretell(program):
    """Return the traces of all replicas, the oracle, and the executed part of the script."""
    oracle = Oracle(PRELUDE, program.size, program.nodes)
    traces = [Trace([]) for _ in range(program.size)]
    try:
        for statement in program.statements:
            oracle.run(statement)
            for trace, names in zip(traces, oracle.names, strict=True):
                trace.models.append(snapshot(names["model"]) if "model" in names else {})
                trace.between_passes.append(bool(oracle.base))
    except RefusedToOneError:
        program = replace(program, statements=program.statements[: len(traces[0].models)])
    except Exception as error:
        for trace in traces:
            trace.error, trace.story = error, traceback.format_exc()
    return traces, oracle, program


def distance(one, other):
    """Return the distance of two models, its place, and the dtype that explains it."""
    worst, what = 0.0, ""
    for name, (p, grad) in one.items():
        theirs, their_grad = other[name]
        pairs = [("", p, theirs)]
        if (grad is None) != (their_grad is None):
            return float("inf"), f"{name}.grad is None on one side"
        if grad is not None:
            pairs.append((".grad", grad, their_grad))
        for part, *both in pairs:
            a, b = (tensor.double() for tensor in both)
            if a.shape != b.shape:
                return float("inf"), f"{name}{part} has another shape"
            same = (a == b) | ~(a.isfinite() | b.isfinite())
            apart = float(
                ((a - b).abs() / (1 + b.abs())).masked_fill(same, 0.0).nan_to_num(nan=9e9).max()
            )
            if apart > worst:
                worst, what = apart, name + part
    return worst, what


def tolerance_of(program, oracle):
    by_dtype = 2e-2 if program.says("half()") else 1e-4 if program.says("float()") else 1e-9
    return max(by_dtype, oracle.atol * 10)


def compare(program, mine, traces, oracle, rank):
    """Return the kind of a failure on this rank and its description, or empty strings."""
    expected = traces[rank]
    at, end = len(mine.models), len(expected.models)
    refused = isinstance(mine.error, HpctrainError)
    if mine.error is not None and not refused and type(mine.error) is not type(expected.error):
        return "error", f"statement {at}: {mine.story.splitlines()[-1]}"
    changes_graph = program.says(" reentrant", "'reentrant")
    half_a_step = program.says("closure") and program.says("backward_passes_per_step")
    sharded = program.says("shard=")
    own = sharded and program.says(".grad", "clip_grad", "join()", ".float()", ".half()")
    # An error is also correct where gradients of an earlier step would now have another weight.
    own |= sharded and program.says("set_num_samples", "hvd.rank() !=", "scaler")
    may_refuse = oracle.may_refuse or changes_graph or half_a_step or own
    if refused and not may_refuse:
        return "refused", f"statement {at}: {type(mine.error).__name__}: {mine.error}"
    if not refused and at != end:
        return "error", f"ended at statement {at} of {end}: {mine.error!r}, not {expected.error!r}"
    by_hand = sharded and program.says("op=hvd.Sum") and program.says(".grad =", ".grad.data =")
    if oracle.unclear or program.says("set_swap_module_params") or by_hand:
        return "", ""  # the first backward after parameters were swapped is averaged in step()
    coarse = freezes(program) or (program.says("compression=") and program.says("Adam"))
    limit = LOOSE if coarse else tolerance_of(program, oracle)
    for number in range(min(at, end)):
        if program.statements[number].kind in ("partial", "each"):
            continue
        got, due = mine.models[number], expected.models[number]
        # These are gradients of an earlier step, or of a step that the scaler skipped: nothing was
        # reduced.
        is_old = program.statements[number].kind == "join" or program.says("scaler.step")
        # A backward inside backward that reaches no gradient outside is reduced only by step().
        if is_old or sharded or changes_graph or expected.between_passes[number]:
            got, due = without_gradients(got), without_gradients(due)
        apart, what = distance(got, due)
        if apart > limit:
            return "value", f"statement {number}: {what} differs by {apart:.3g}"
    return "", ""


def without_gradients(model):
    return {name: (p, None) for name, (p, _) in model.items()}


def freezes(program):
    return program.says("requires_grad_") and program.says("StagedSGD")


def check(world, program):
    """Run a program and compare it with the oracle. Collective over ``world``.

    Returns:
        The kind of failure and its description, the same on every rank; empty strings if none.
    """
    warnings.simplefilter("ignore")
    with pytest.MonkeyPatch.context() as patch:
        for name, value in program.settings.items():
            patch.setenv(name, value)
        hpctrain.init(ranks_per_node=program.per_node)
        torch.set_num_threads(1)
        traces, oracle, program = foretell(program)
        torch.__future__.set_swap_module_params_on_conversion(False)
        mine = carry_out(program)
        torch.__future__.set_swap_module_params_on_conversion(False)
    kind, what = compare(program, mine, traces, oracle, world.rank)
    mark = f"{len(mine.models)} statements, then {type(mine.error).__name__}"
    if mine.error is not None and program.says("shard="):
        mark = "stopped"  # raised by synchronize(), or by torch elsewhere
    last = mine.models[-1] if mine.models else {}
    last = without_gradients(last)
    kinds, words, marks, models = zip(*world.allgather((kind, what, mark, last)), strict=True)
    message = "\n".join(
        f"rank {r}: {rest}" for r, rest in enumerate(zip(kinds, words, marks, strict=True))
    )
    if len(set(marks)) > 1:
        return "ranks differ", message
    hpctrain.shutdown()
    if any(kinds):
        return next(filter(None, kinds)), message
    if mine.error is None and not left_apart(program):
        for rank, model in enumerate(models):
            apart, where = distance(models[0], model)
            if apart:
                return "parted", f"ranks 0 and {rank} differ in {where} by {apart:.3g}"
    return "", ""


def left_apart(program):
    """Return True if the script may end in the middle of a round."""
    return program.says("method = ") and program.statements[-1].kind != "finish"


PER_NODE = int(os.environ.get("TEST_PER_NODE", "0"))
"""Ranks of each node, for scripts with parameters once a node: sums begin in backward then."""
NUM_PROGRAMS = int(os.environ.get("TEST_PROGRAMS", "15"))
"""On each number of ranks; ``make soak`` carries out 500."""


@pytest.mark.ranks(2, 3)
@pytest.mark.parametrize("seed", range(NUM_PROGRAMS))
def test_a_script_trains_as_replicas_of_plain_torch_do(world, seed):
    if hpctrain.is_initialized():
        pytest.fail("on a script before the ranks parted, and left their world behind")
    program = draw_program(seed, world.size)
    kind, message = check(world, program)
    assert not kind, f"{message}\n{program.script(kind)}"


@pytest.mark.ranks(2, 3)
@pytest.mark.parametrize("seed", range(-(-NUM_PROGRAMS // 2)))
def test_a_script_with_parameters_once_a_node_trains_as_replicas_do(world, seed):
    if hpctrain.is_initialized():
        pytest.fail("on a script before the ranks parted, and left their world behind")
    program = draw_program(seed, world.size, sharded=True)
    if PER_NODE:
        program = replace(program, per_node=PER_NODE, overlap="thread")
    kind, message = check(world, program)
    assert not kind, f"{message}\n{program.script(kind)}"


def replicas(*lines, size=2):
    oracle = Oracle(PRELUDE, size, [list(range(size))])
    for line, kind in lines:
        oracle.run(Statement(line, kind))
    return oracle, [names["model"].lone.bias.grad for names in oracle.names]


@pytest.mark.parametrize("op", ["Average", "Sum"])
def test_oracle_reduces_once_and_statements_act_on_reduced_gradients(op):
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


def test_most_scripts_complete_and_few_may_be_rejected():
    ended = refusable = 0
    for seed in range(NUM_PROGRAMS):
        traces, oracle, _ = foretell(draw_program(seed, 2))
        ended += traces[0].error is None
        refusable += bool(oracle.may_refuse)
    assert ended > 0.6 * NUM_PROGRAMS
    assert refusable < 0.4 * NUM_PROGRAMS

"""Training scripts drawn at random, compared with replicas of plain torch.

In the tests, and as a program that starts its own ranks, goes on behind a script that hangs, and
shrinks what it finds: ``python -m tests.gradients.programs --ranks 3 -n 500 --seed 1``.
"""

import argparse
import dataclasses
import os
import signal
import subprocess
import sys
import time
import traceback
import warnings
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path

import torch

import hpctrain
from hpctrain.core.errors import HpctrainError
from tests.gradients.program_oracle import LOOSE, Oracle
from tests.gradients.program_table import PRELUDE, draw_program
from tests.gradients.program_wraps import dense

LIMIT_S = 45.0
"""A script that makes no progress for so long hangs."""
LAUNCHES = 32
"""Smaller scripts that are tried for a finding, each in a world of its own."""
BROKEN = 3
"""Exit code of ranks that have a finding."""


@dataclass
class Trace:
    """What a script has done on one rank, or on all replicas: the models, and an error."""

    models: list
    """After each statement: parameters and gradients by name."""
    between_passes: list = field(default_factory=list)
    """After each statement: whether passes have added to what was reduced. No rank's gradient
    means something then."""
    error: BaseException | None = None
    story: str = ""


def snapshot(model):
    return {
        name: (p.detach().clone(), None if p.grad is None else dense(p.grad).detach().clone())
        for name, p in model.named_parameters()
    }


def carry_out(program, on_statement):
    """Run the script of one rank by hpctrain. Collective."""
    names, trace = {"hvd": hpctrain}, Trace([])
    exec(PRELUDE, names)
    try:
        for number, statement in enumerate(program.statements):
            on_statement(number)
            exec(statement.line, names)
            trace.models.append(snapshot(names["model"]) if "model" in names else {})
    except Exception as error:
        trace.error, trace.story = error, traceback.format_exc()
        trace.error.__traceback__ = None
    return trace


def foretell(program):
    """Return what the script does to each replica, and the oracle."""
    oracle = Oracle(PRELUDE, program.size, program.nodes)
    traces = [Trace([]) for _ in range(program.size)]
    try:
        for statement in program.statements:
            oracle.run(statement)
            for trace, names in zip(traces, oracle.names, strict=True):
                trace.models.append(snapshot(names["model"]) if "model" in names else {})
                trace.between_passes.append(bool(oracle.base))
    except Exception as error:
        for trace in traces:
            trace.error, trace.story = error, traceback.format_exc()
    return traces, oracle


def distance(one, other):
    """Return how far two models are apart, by what, and by which dtype that is excused."""
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
    """Return what is wrong on this rank: nothing, or a kind of finding and a sentence."""
    expected = traces[rank]
    at, end = len(mine.models), len(expected.models)
    refused = isinstance(mine.error, HpctrainError)
    if mine.error is not None and not refused and type(mine.error) is not type(expected.error):
        return "error", f"statement {at}: {mine.story.splitlines()[-1]}"
    changes_graph = program.says(" reentrant", "'reentrant")
    half_a_step = program.says("closure") and program.says("backward_passes_per_step")
    may_refuse = oracle.may_refuse or changes_graph or half_a_step
    if refused and not may_refuse:
        return "refused", f"statement {at}: {type(mine.error).__name__}: {mine.error}"
    if not refused and at != end:
        return "error", f"ended at statement {at} of {end}: {mine.error!r}, not {expected.error!r}"
    if oracle.unclear or program.says("set_swap_module_params"):
        return "", ""  # the first backward after parameters were swapped is averaged in step()
    coarse = freezes(program) or (program.says("compression=") and program.says("Adam"))
    limit = LOOSE if coarse else tolerance_of(program, oracle)
    for number in range(min(at, end)):
        if program.statements[number].kind in ("partial", "each"):
            continue
        got, due = mine.models[number], expected.models[number]
        # Gradients of before; or those of a step that a scaler left out, so nothing was reduced.
        is_old = program.statements[number].kind == "join" or program.says("scaler.step")
        # A backward inside backward that reaches no gradient outside is reduced by step() alone.
        if is_old or changes_graph or expected.between_passes[number]:
            got, due = without_gradients(got), without_gradients(due)
        apart, what = distance(got, due)
        if apart > limit:
            return "value", f"statement {number}: {what} differs by {apart:.3g}"
    return "", ""


def without_gradients(model):
    return {name: (p, None) for name, (p, _) in model.items()}


def freezes(program):
    return program.says("requires_grad_") and program.says("StagedSGD")


def check(world, program, on_statement=lambda _: None):
    """Carry a program out and compare it with the oracle. Collective over ``world``.

    Returns:
        The kind of finding and what each rank found, the same on every rank; empty if all is well.
    """
    warnings.simplefilter("ignore")
    with environment(program.settings):
        hpctrain.init(ranks_per_node=program.per_node)
        torch.set_num_threads(1)
        traces, oracle = foretell(program)
        torch.__future__.set_swap_module_params_on_conversion(False)
        mine = carry_out(program, on_statement)
        torch.__future__.set_swap_module_params_on_conversion(False)
    kind, what = compare(program, mine, traces, oracle, world.rank)
    mark = f"{len(mine.models)} statements, then {type(mine.error).__name__}"
    last = mine.models[-1] if mine.models else {}
    last = without_gradients(last)
    kinds, words, marks, models = zip(*world.allgather((kind, what, mark, last)), strict=True)
    said = "\n".join(
        f"rank {r}: {rest}" for r, rest in enumerate(zip(kinds, words, marks, strict=True))
    )
    if len(set(marks)) > 1:
        return "ranks differ", said
    hpctrain.shutdown()
    if any(kinds):
        return next(filter(None, kinds)), said
    if mine.error is None and not left_apart(program):
        for rank, model in enumerate(models):
            apart, where = distance(models[0], model)
            if apart:
                return "parted", f"ranks 0 and {rank} differ in {where} by {apart:.3g}"
    return "", ""


@contextmanager
def environment(settings):
    before = {name: os.environ.get(name) for name in settings}
    os.environ |= settings
    yield
    for name, value in before.items():
        if value is None:
            del os.environ[name]
        else:
            os.environ[name] = value


def left_apart(program):
    """Say whether the script may end in mid-round."""
    return program.says("method = ") and program.statements[-1].kind != "finish"


def part_of(program, keep):
    return dataclasses.replace(program, moves=tuple(program.moves[i] for i in keep))


def work(asked):
    """Be one of the ranks: carry out programs, and stop at the first finding."""
    from mpi4py import MPI  # noqa: PLC0415 - the supervisor is no rank

    world = MPI.COMM_WORLD.Dup()
    place = asked.folder / f"place-{world.rank}"
    (asked.folder / f"pid-{world.rank}").write_text(str(os.getpid()))
    for number in range(asked.first, asked.first + asked.n):
        program = draw_program(f"{asked.seed}/{number}", world.size)
        if asked.keep:
            program = part_of(program, [int(i) for i in asked.keep.split(",")])

        def tell(at, number=number):
            place.write_text(f"{number} {at} {time.monotonic()}")

        kind, said = check(world, program, tell)
        if kind:
            sys.stdout.write(f"{kind}\n{said}\n")
            sys.stdout.flush()
            world.Barrier()
            os._exit(BROKEN)
        place.write_text(f"{number + 1} 0")
    world.Barrier()


def launch(asked, first, count, keep=""):
    """Start the ranks, and end them if they make no progress.

    Returns:
        The program that is a finding, or None; and what is known of it.
    """
    for left in (*asked.folder.glob("place-*"), *asked.folder.glob("pid-*")):
        left.unlink()
    command = [sys.executable, "-m", "hpctrain", "launch", "-n", str(asked.ranks), "--"]
    command += [sys.executable, "-m", "tests.gradients.programs", "--folder", str(asked.folder)]
    command += ["-n", str(count), "--seed", str(asked.seed), "--first", str(first)]
    command += ["--keep", keep] if keep else []
    log = (asked.folder / "log").open("w")
    running = subprocess.Popen(command, stdout=log, stderr=log, start_new_session=True)
    last, since = {}, time.monotonic()
    while (code := poll(running)) is None:
        places = {p.name: p.read_text() for p in asked.folder.glob("place-*")}
        if places != last:
            last, since = places, time.monotonic()
        elif places and time.monotonic() - since > LIMIT_S:
            for one in asked.folder.glob("pid-*"):  # then the launcher ends by itself
                os.kill(int(one.read_text()), signal.SIGKILL)
            running.wait()
            code = "hang"
            break
    done = [int(text.split()[0]) for text in last.values() if text]
    if code == 0:
        return None, ""
    places = ", ".join(f"{name} at {text}" for name, text in sorted(last.items()))
    said = f"{(asked.folder / 'log').read_text()[-1500:]}{code}: {places}"
    return min(done, default=first), said


def poll(running):
    try:
        return running.wait(0.2)
    except subprocess.TimeoutExpired:
        return None


def supervise(asked):
    """Carry out all programs, and shrink each that is a finding."""
    asked.folder.mkdir(parents=True, exist_ok=True)
    first, end, found = asked.first, asked.first + asked.n, []
    while first < end:
        number, said = launch(asked, first, end - first)
        if number is None:
            break
        program = draw_program(f"{asked.seed}/{number}", asked.ranks)
        script = shrunk(asked, number, program, said)
        finding = asked.folder / f"{asked.ranks}-{asked.seed}-{number}.py"
        finding.write_text(script)
        found.append(finding)
        first = number + 1
    for finding in found:
        sys.stdout.write(f"{finding}\n{finding.read_text()}\n")
    sys.stdout.write(f"{asked.n} programs on {asked.ranks} ranks, {len(found)} findings\n")
    return bool(found)


def shrunk(asked, number, program, said):
    """Leave out what is not needed for a finding; each smaller program has a world of its own."""
    keep = list(range(len(program.moves)))
    count, left = max(len(keep) // 2, 1), LAUNCHES
    while count and left:
        first = 0
        while first < len(keep) > count and left:
            rest = keep[:first] + keep[first + count :]
            is_found, told = launch(asked, number, 1, ",".join(map(str, rest)))
            left -= 1
            if is_found is not None:
                keep, said = rest, told
            else:
                first += count
        count //= 2
    return part_of(program, keep).script(said)


def main():
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("-n", type=int, default=100, help="programs")
    parser.add_argument("--seed", type=int, default=0, help="another seed, other programs")
    parser.add_argument("--first", type=int, default=0, help="number of the first program")
    parser.add_argument("--ranks", type=int, default=0, help="start so many; else be one of them")
    parser.add_argument("--keep", default="", help="the moves of one program that are kept")
    parser.add_argument("--folder", type=Path, default=Path("build/programs"))
    asked = parser.parse_args()
    if asked.ranks:
        sys.exit(supervise(asked))
    work(asked)


if __name__ == "__main__":
    main()

"""Properties that every exchange of gradients or weights in a training step must have.

Each test runs ``train_step`` with every exchange and compares with one process.
"""

import copy
import math
import subprocess
from pathlib import Path

import pytest
import torch
from torch import nn
from torch.distributed.tensor import DTensor
from torch.nn.functional import cross_entropy

import hpctrain
from hpctrain.checkpoint.export import newest_state
from hpctrain.checkpoint.format.state_hash import state_hash
from hpctrain.cluster.env import RANK_LOST
from hpctrain.core.records import read
from hpctrain.data.loader import Loader
from hpctrain.train import averaged_exchange, task
from hpctrain.train.finite import StepGuard
from hpctrain.train.loop import train_step
from hpctrain.train.metrics import Metrics
from hpctrain.train.run_state import RunState
from tests.comm.test_adasum import reference
from tests.harness import preload
from tests.train import divided, problem
from tests.train.starting import start, write_config

pytestmark = pytest.mark.ranks(1, 2, 3, 4)

RATE = 0.5
BATCH, EPOCH_STEPS = 13, 5  # the last batch has one sample, so all ranks but one have none
MOST_NORM = 0.05  # below the gradient norm of every step
EXCHANGES = {
    "averaged": (),
    "adasum": (),
    "node-sharded": ("train.shard=node",),
    "local": ("sync.method=local_sgd", "sync.steps=1"),
    "asynchronous": ("sync.method=ssp", "sync.staleness=0"),
    "reproducible": ("train.reproducible=true",),
    "model-parallel": ("parallel.roles={'1' = 'column', '4' = 'row'}",),
}
ALONE = ("local", "asynchronous")  # ranks skip steps separately
OWN = ("adasum", *ALONE)  # each rank clips its own gradient


def by_adasum(_, model: nn.Module, optimizer):
    """Return an optimizer that combines steps by Adasum, with equal weights of all ranks."""
    made = hpctrain.DistributedOptimizer(optimizer, model.named_parameters(), op=hpctrain.Adasum)
    made.set_num_samples = lambda *_, **__: None
    return made


class Run:
    """Steps of a run with one exchange, on all ranks."""

    def __init__(self, here, configure, exchange: str, *overrides: str) -> None:
        self.exchange, self.comm = exchange, here.comm
        settings = [f"train.global_batch={BATCH}", "model.args.width=12", f"optimizer.lr={RATE}"]
        if exchange == "model-parallel":
            settings.append(f"parallel.tp={here.comm.size}")
        self.config = configure(*settings, *EXCHANGES[exchange], *overrides)
        with pytest.MonkeyPatch.context() as patched:
            if exchange == "adasum":
                patched.setattr(averaged_exchange, "distributed", by_adasum)
            self.task = task.build(self.config, here.comm)
        self.state = RunState(task=self.task)
        self.guard = StepGuard(self.task, Metrics(None), self.state.guard)

    def steps(self, number: int, flags: int = 0, *, must_agree: bool = True) -> list[tuple]:
        """Take the first steps of an epoch; return the results of ``train_step``."""
        found = []
        for _, batch in zip(range(number), self.task.train, strict=False):
            self.state.step += 1
            self.guard.begin(self.state.step, RATE, flags)
            self.task.exchange.begin(1.0, must_agree=must_agree)
            found.append(train_step(self.task, batch, self.guard))
        return found

    def weights(self) -> list[torch.Tensor]:
        """Return all parameters, unsharded. Collective."""
        with self.task.averaged():
            values = [p.detach() for p in self.task.model.parameters()]
            return [v.full_tensor() if isinstance(v, DTensor) else v.clone() for v in values]


here = pytest.fixture(scope="module")(divided.joined)


@pytest.fixture(params=EXCHANGES)
def run(request, here, configure):
    made = []

    def make(*overrides: str) -> Run:
        made.append(Run(here, configure, request.param, *overrides))
        return made[-1]

    yield make
    for each in made:
        each.task.exchange.close()


def gradients(model: nn.Module, batch) -> list[torch.Tensor]:
    model.zero_grad()
    if len(batch.y):
        cross_entropy(model(batch.x), batch.y).backward()
    return [torch.zeros_like(p) if p.grad is None else p.grad.clone() for p in model.parameters()]


def alone(run: Run, num_steps: int, *, clips: bool = False) -> tuple[list[torch.Tensor], list]:
    """Train one process with a plain loop; return the parameters and the loss of each batch."""
    torch.manual_seed(run.config.seed)
    model, losses = problem.model(12), []
    size = run.comm.size if run.exchange == "adasum" else 1
    how = {"global_batch": BATCH, "order": run.config.data.order, "seed": run.config.seed}
    loaders = [Loader(run.task.train.dataset, **how, rank=r, size=size) for r in range(size)]
    whole = Loader(run.task.train.dataset, **how)
    for _, batch, *parts in zip(range(num_steps), whole, *loaders, strict=False):
        with torch.no_grad():
            losses.append(cross_entropy(model(batch.x), batch.y).item())
        found = [
            reference([*each]) for each in zip(*(gradients(model, p) for p in parts), strict=True)
        ]
        norm = math.sqrt(sum(gradient.square().sum().item() for gradient in found))
        assert norm > MOST_NORM
        with torch.no_grad():
            factor = RATE * (MOST_NORM / (norm + 1e-6) if clips else 1)
            torch._foreach_sub_([*model.parameters()], found, alpha=factor)
    return [p.detach() for p in model.parameters()], losses


def assert_equal_on_all(run: Run) -> list[torch.Tensor]:
    """Check that all ranks have the same weights, and return them. Collective."""
    found = run.weights()
    assert len(set(run.comm.allgather_object(state_hash({"weights": found})))) == 1
    return found


def test_steps_equal_those_of_one_process_also_without_samples_on_some_ranks(run):
    made = run()
    found = made.steps(EPOCH_STEPS)
    expected, losses = alone(made, EPOCH_STEPS)
    torch.testing.assert_close(assert_equal_on_all(made), expected, rtol=1e-10, atol=1e-12)
    for (*_, is_taken), step in zip(found, range(EPOCH_STEPS), strict=True):
        sums = made.comm.allgather_object(found[step][:2])
        assert is_taken
        assert sum(number for _, number in sums) == (BATCH if step < EPOCH_STEPS - 1 else 1)
        mean = sum(loss * number for loss, number in sums) / sum(number for _, number in sums)
        assert mean == pytest.approx(losses[step], rel=1e-10)


def test_flags_of_any_rank_reach_all_ranks_in_the_same_step(run):
    made = run()
    made.steps(1, 1 << made.comm.rank % 2)
    assert made.task.exchange.raised_flags == (0b11 if made.comm.size > 1 else 0b01)
    made.steps(1)
    assert made.task.exchange.raised_flags == 0


@pytest.mark.parametrize("run", [name for name in EXCHANGES if name not in OWN], indirect=True)
def test_the_combined_gradient_is_clipped(run):
    made = run(f"train.clip_norm={MOST_NORM}")
    made.steps(3)
    expected, _ = alone(made, 3, clips=True)
    torch.testing.assert_close(assert_equal_on_all(made), expected, rtol=1e-9, atol=1e-12)


FLAWS = {"loss": lambda output: output * torch.nan, "gradient": problem.Flawed.apply}


@pytest.mark.parametrize("where", FLAWS)
@pytest.mark.parametrize("run", [name for name in EXCHANGES if name != "adasum"], indirect=True)
def test_a_skipped_step_changes_nothing(run, where, monkeypatch):
    made = run("train.on_non_finite=skip")
    made.steps(2)
    before = copy.deepcopy(made.task.optimizer.state_dict()), made.weights()
    if made.comm.rank == made.comm.size - 1 or made.exchange in ALONE:
        network = made.task.model.forward
        spoil = FLAWS[where]
        monkeypatch.setattr(made.task.model, "forward", lambda x: spoil(network(x)))
    taken = [is_taken for *_, is_taken in made.steps(1)]
    monkeypatch.undo()
    assert taken == [False]
    # not exactly equal, because the mean of three equal replicas is rounded
    torch.testing.assert_close(made.weights(), before[1], rtol=1e-15, atol=0)
    assert state_hash(made.task.optimizer.state_dict()) == state_hash(before[0])


def test_a_restored_state_continues_with_the_same_bits(run):
    made = run("optimizer.args.momentum=0.5")
    made.steps(2)
    with made.task.exchange.settled():  # includes the state of the servers
        kept = copy.deepcopy((made.state.shared(), made.state.own()))
    made.steps(2)
    first = made.weights()
    made.state.restore(*kept)
    made.steps(2)
    assert state_hash({"weights": made.weights()}) == state_hash({"weights": first})


@pytest.mark.ranks(2, 3, 4)
def test_an_averaging_run_continues_from_the_mean_of_replicas(here, configure):
    local = Run(here, configure, "local", "sync.steps=4")
    local.steps(1, must_agree=False)
    kept = copy.deepcopy((local.state.shared(), local.state.own()))
    assert kept[1]["replica"]
    local.task.exchange.close()
    averaged = Run(here, configure, "averaged")
    averaged.state.restore(*kept)
    torch.testing.assert_close(
        assert_equal_on_all(averaged),
        [kept[0]["model"][name] for name, _ in averaged.task.model.named_parameters()],
    )


def long(*exchanges: str) -> list:
    """Mark cases that only ``make conformance`` runs."""
    return [pytest.param(name, marks=pytest.mark.conformance) for name in exchanges]


@pytest.mark.launches
@pytest.mark.ranks(1)
@pytest.mark.parametrize(
    "exchange",
    [
        *("averaged", "asynchronous"),
        *long("node-sharded", "local", "reproducible", "model-parallel"),
    ],
)
def test_an_error_in_backward_on_one_rank_ends_all_ranks(exchange, tmp_path):
    write_config(tmp_path, "tests.train.problem:underivable", epochs=2)
    settings = [*EXCHANGES[exchange], *["parallel.tp=2"] * (exchange == "model-parallel")]
    words = [word for setting in settings for word in ("--set", setting)]
    done = start("-m", "hpctrain", "train", "small.toml", *words, num_ranks=2, cwd=tmp_path)
    assert done.returncode == 1, done.stderr
    assert "[rank 1] ValueError: this layer has no gradient" in done.stderr
    assert "test accuracy" not in done.stdout


def with_a_lost_rank(exchange: str, folder: Path) -> subprocess.CompletedProcess[str]:
    """Train on 3 ranks, of which rank 1 dies in step 3, after the checkpoint of step 2."""
    write_config(folder, "tests.train.problem:dying_model", epochs=1, batch=BATCH)
    keys = ["checkpoint.every=2", "checkpoint.background=false", f"optimizer.lr={RATE}"]
    keys += ["output_dir=run", "schedule.name=constant", *EXCHANGES[exchange]]
    keys += ["parallel.tp=3"] * (exchange == "model-parallel")
    words = [word for key in keys for word in ("--set", key)]
    line = [*preload.python(), "-m", "hpctrain", "train", "small.toml", *words]
    return start("-m", "hpctrain", "launch", "-n", "3", "--recover", *line, cwd=folder)


@pytest.mark.launches
@pytest.mark.ranks(1)
@pytest.mark.requires("recovery")
@pytest.mark.parametrize(
    "exchange",
    ["averaged", "node-sharded", *long("local", "asynchronous", "reproducible")],
)
def test_steps_after_a_lost_rank_equal_those_of_one_process(here, configure, exchange, tmp_path):
    done = with_a_lost_rank(exchange, tmp_path)
    assert done.returncode == 0, done.stderr
    assert "rank 1 of 3 died; the 2 survivors continue" in done.stderr
    records = read(tmp_path / "run" / "metrics.jsonl")
    assert [r["world_size"] for r in records if "world_size" in r] == [3, 2, 2]
    _, state = newest_state(tmp_path / "run", "model")
    expected, _ = alone(Run(here, configure, "averaged"), EPOCH_STEPS)
    torch.testing.assert_close([*state.values()], expected, rtol=1e-10, atol=1e-12)


@pytest.mark.launches
@pytest.mark.ranks(1)
@pytest.mark.requires("recovery")
def test_a_model_parallel_run_ends_with_a_lost_rank_and_a_remedy(tmp_path):
    done = with_a_lost_rank("model-parallel", tmp_path)
    assert done.returncode == RANK_LOST
    assert "a run with [parallel] must end when it loses a rank" in done.stderr
    assert "continue it with --resume" in done.stderr
    assert "hpctrain.elastic.run" not in done.stderr  # a remedy for runs that can recover

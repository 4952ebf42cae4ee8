"""Runs with ``[parallel]``: any layout trains as one process does and can resume in any other."""

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode

from hpctrain import ConfigError
from hpctrain.checkpoint.export import newest_state
from hpctrain.core.errors import MismatchError, NotFiniteError, ReplicaError, TopologyError
from hpctrain.core.records import read
from hpctrain.parallel.dtensor import local
from hpctrain.runtime.world import current
from hpctrain.train.load_config import load
from hpctrain.train.model import prepare
from tests.train import divided
from tests.train.job import Job

EXACT = {"rtol": 1e-12, "atol": 1e-12}

LAYOUTS = (
    "tp=2 pp=2 recompute=selective",
    "cp=2 zero=3 recompute=full",
)
OTHERS = (
    "tp=2 sequence=true recompute=selective",
    "tp=4 zero=1",
    "tp=2 zero=3",
    "tp=2 cp=2 sequence=true",
    "pp=4 schedule=gpipe micro_batches=3",
    "pp=2 schedule=interleaved micro_batches=3",
    "pp=2 schedule=zero_bubble recompute=full",
    "pp=2 zero=1",
    "pp=2 zero=3 recompute=full",
    "pp=2 cp=2",
    "cp=4",
    "zero=1",
    "zero=2",
    "zero=3 offload=.",
)


here = pytest.fixture(scope="module")(divided.joined)


@pytest.fixture
def job(here, shared):
    """Function that configures a run whose parts are executed in this process."""

    def make(layout: str, *overrides: str) -> Job:
        axes = [f"parallel.{each}" for each in layout.split()]
        places = [f"data.args.folder={shared}/d", f"output_dir={shared}/run"]
        words = [*divided.SETTINGS, *places, *axes, *overrides]
        return Job(here, lambda *_: load(None, words).config, shared / "run")

    return make


def check(job: Job, task, **how) -> None:
    """Compare the records and the model of a run with a plain loop in one process."""
    job.here.comm.barrier()
    losses, weights, tested = divided.alone(task.train.dataset, **how)
    found = read(job.directory.metrics)
    steps = [record["loss"] for record in found if record["event"] == "step"]
    torch.testing.assert_close(steps, losses, **EXACT)
    torch.testing.assert_close([found[-1]["loss"], found[-1]["metric"]], [*tested], **EXACT)
    assert found[-1]["num_samples"] == divided.NUM_SAMPLES
    saved = newest_state(job.directory.path)[1]["model"]
    assert saved.keys() == weights.keys()
    for name, value in weights.items():
        torch.testing.assert_close(saved[name], value, **EXACT)


@pytest.mark.ranks(4)
@pytest.mark.parametrize(
    "layout", [*LAYOUTS, *(pytest.param(each, marks=pytest.mark.conformance) for each in OTHERS)]
)
def test_a_layout_trains_as_one_process_does(job, layout):
    accumulate = 1 if "pp" in layout else 2
    one = job(layout, f"train.accumulate={accumulate}")
    task = one.built()
    one.part(task=task)
    check(one, task)


@pytest.mark.conformance
@pytest.mark.ranks(3)
@pytest.mark.parametrize("layout", ["zero=3", "pp=3"])
def test_unequal_parts_train_as_one_process_does(job, layout):
    one = job(layout)
    task = one.built()
    one.part(task=task)
    check(one, task)


def goes_on(job, layouts):
    for number, layout in enumerate(layouts, 1):
        one = job(layout, "train.epochs=2", "model.args.tied=true")
        task = one.built()
        is_last = number == len(layouts)
        one.part(task=task, **({} if is_last else {"stop": "SIGUSR1", "after": 1 + number % 2}))
    check(one, task, epochs=2, tied=True)


@pytest.mark.ranks(4)
def test_a_run_resumes_in_any_other_layout(job):
    goes_on(job, ["", "tp=2", "pp=2", "zero=3", ""])


@pytest.mark.conformance
@pytest.mark.ranks(4)
def test_a_run_resumes_in_many_layouts(job):
    goes_on(
        job, ["zero=1", "cp=2", "tp=2 zero=3", "pp=2 zero=1", "tp=4", "pp=4", "zero=2", "tp=2"]
    )


@pytest.mark.ranks(4)
@pytest.mark.parametrize(
    ("layout", "compared", "output"),
    [
        ("pp=2", "error", "ranks must hold the same values of replicated parameters"),
        ("tp=2", "off", "must be equal, but"),  # compared before each test instead
        ("pp=2", "off", "must be equal, but"),
    ],
)
def test_diverged_replicas_are_an_error_on_all_ranks(job, layout, compared, output, monkeypatch):
    monkeypatch.setenv("HPCTRAIN_CHECK_WEIGHTS", compared)
    one = job(layout)
    task = one.built()

    def part():
        if one.here.comm.rank == 3:
            with torch.no_grad():
                local(next(task.model.parameters())).view(-1)[0] += 1e-9

    with pytest.raises(ReplicaError, match=output):
        one.part(task=task, at={2: part})


@pytest.mark.ranks(4)
@pytest.mark.parametrize("layout", ["tp=2", "pp=2"])
def test_a_loss_of_one_replica_that_is_not_finite_ends_all_ranks(job, layout):
    words = "train.clip_norm=0", "train.clip_value=0", "loss.target=tests.train.divided:flawed"
    output = r"they are not on ranks (0-1|2-3) in step \d, .*\n  rank .: loss nan .* samples .*13"
    with pytest.raises(NotFiniteError, match=output):
        job(layout, *words).part()


@pytest.mark.ranks(4)
@pytest.mark.parametrize("layout", ["tp=2 zero=3", "pp=2"])
def test_all_ranks_of_a_layout_roll_back_after_a_spike_of_one_sample(job, layout):
    words = [
        "loss.target=tests.train.divided:spiking",
        "train.on_spike=rollback",
        "train.spike_window=2",
        "train.spike_deviations=30",
        "train.snapshot_every=2",
        "log.hash_every=1",
    ]
    one = job(layout, *words)
    one.part()
    one.here.comm.barrier()
    records = read(one.directory.metrics)
    (spike,) = [r for r in records if r["event"] == "spike"]
    hashes = [r["state_hash"] for r in records if r["event"] == "hash"]
    before = (spike["step"] - 1) // 2 * 2  # the step of the last snapshot
    assert before > 0
    assert spike["skipped"] == spike["step"] - before
    assert any(divided.SPIKING in r["samples"] for r in spike["ranks"])
    assert spike["loss"] > 100
    assert hashes[spike["step"] - 1] == hashes[before - 1]
    assert len({*hashes}) == len(hashes) - 1


@pytest.mark.ranks(4)
def test_ranks_of_one_replica_draw_the_same_random_numbers(job):
    job("tp=2").built()
    drawn = current().comm.allgather_object(torch.rand(()).item())
    assert drawn[0] == drawn[1] != drawn[2] == drawn[3]


@pytest.mark.ranks(4)
@pytest.mark.parametrize("layout", ["tp=2", "zero=1"])
def test_unused_parameters_do_not_change(job, layout):
    one = job(layout, "model.target=tests.train.divided:spare_model")
    task = one.built()
    before = local(task.model.spare.weight).detach().clone()
    one.part(task=task)
    assert torch.equal(local(task.model.spare.weight), before)


class Products(TorchDispatchMode):
    """Count matrix products, and all other operations."""

    def __init__(self):
        super().__init__()
        self.products = self.others = 0

    def __torch_dispatch__(self, function, _, args=(), kwargs=None):
        is_product = function is torch.ops.aten.mm.default
        self.products += is_product
        self.others += not is_product
        return function(*args, **(kwargs or {}))


def test_recompute_repeats_the_forward_of_layers():
    found = {}
    for how in ("none", "selective", "full"):
        model = divided.model()
        prepare(model, load(None, [f"parallel.recompute={how}"]).config)
        with Products() as counted:
            model(torch.zeros(2, divided.LENGTH, dtype=torch.long)).sum().backward()
        found[how] = counted
    none, selective, full = found.values()
    # repeated products of two blocks, without the last one, whose output is not needed
    layers = 2 * 6
    assert (selective.products, full.products) == (none.products, none.products + layers)
    assert none.others < min(selective.others, full.others)


@pytest.mark.parametrize(
    ("layout", "other"),
    [
        ("tp=2", "sync.method=local_sgd"),
        ("pp=2", "sync.compression=fp16"),
        ("cp=2", "train.reproducible=true"),
        ("zero=1", "train.shard=node"),
        ("zero=2", "train.ema=0.9"),
        ("tp=2", "train.precision=fp16"),
        ("tp=2", "train.compile=true"),
        ("tp=2", "log.noise_scale=true"),
        ("pp=2", "train.accumulate=2"),
        ("recompute=full", 'train.activation_checkpointing=["blocks.*"]'),
        ("pp=2", "parallel.schedule=zbv"),
        ("", "parallel.sequence=true"),
        ("", "parallel.micro_batches=4"),
        ("pp=2 schedule=interleaved", "parallel.zero=1"),
        ("", "parallel.zero=4"),
        ("", "parallel.offload=cpu"),
    ],
)
def test_incompatible_options_are_rejected_with_the_configuration(layout, other):
    words = [f"parallel.{each}" for each in layout.split()]
    with pytest.raises(ConfigError) as refusal:
        load(None, [*words, other])
    key, _, value = other.partition("=")
    output = str(refusal.value).removeprefix(f"argument --set {other}: ")
    assert key in output
    assert value.strip("[]") in output.lower().replace("'", '"')


@pytest.mark.ranks(2)
@pytest.mark.parametrize(
    ("layout", "other", "rule"),
    [
        (
            "tp=2",
            "model.target=tests.train.problem:model",
            "by an attribute parallel_roles of Seq",
        ),
        ("pp=2", "model.target=tests.train.problem:model", "by an attribute parallel_layers of S"),
        ("cp=2", "model.target=tests.train.problem:model", "must have a method parallel_context"),
        ("zero=1", "optimizer.name=LAMB", "update each element separately"),
        ("tp=2", "model.target=tests.train.divided:odd_model", "the 9 outputs of"),
        ("pp=2", 'parallel.layers=["embedding"]', "every parameter of a pipeline must belong to"),
        ("tp=2 dp=2", "seed=1", "must be the number of ranks, 2, got"),
        ("dp=1", "seed=1", "must be the number of ranks, 2"),
    ],
)
def test_indivisible_models_are_an_error_on_all_ranks(job, layout, other, rule):
    with pytest.raises((MismatchError, ConfigError, TopologyError), match=rule):
        job(layout, "optimizer.args={}", other).built()

"""A loss or gradient that is not finite stops all ranks, or all ranks skip the step."""

from itertools import pairwise

import pytest

from hpctrain.checkpoint.manager import Manager
from hpctrain.core.errors import NotFiniteError
from hpctrain.core.records import read
from hpctrain.train.attempts import RunPart
from hpctrain.train.loop import Outcome
from hpctrain.train.resume import check_same
from hpctrain.train.run_status import status
from hpctrain.train.step_findings import NotFiniteFinding, message_of
from tests.train.job import Job, assert_same_bits

FLAWED = [
    "model.target=tests.train.problem:flawed_model",
    "log.hash_every=1",
    "checkpoint.every=1",
    "checkpoint.background=false",
    "train.epochs=2",
    "schedule.name=constant",  # the hash includes the learning rate
]
GRADIENT = "model.args.in_loss=false"
SKIP = "train.on_non_finite=skip"
FIXED = ["train.reproducible=true", "train.micro_shards=4"]
ANY = pytest.mark.ranks(1, 3)
TWO = pytest.mark.ranks(2)
LONG = pytest.mark.conformance


def last_checkpoint(here, job: Job):
    manager = Manager(job.directory.checkpoints, here.comm)
    loaded = manager.load_latest()
    manager.close()
    return loaded


def assert_finite(state) -> None:
    for tensor in state.values():
        assert bool(tensor.isfinite().all())


def hashes(job: Job) -> list[str]:
    job.here.comm.barrier()
    return [r["state_hash"] for r in read(job.directory.metrics) if r["event"] == "hash"]


@ANY
@pytest.mark.parametrize(
    "overrides",
    [[], [*FIXED, GRADIENT, "train.clip_norm=1"]],
    ids=["loss", "reproducible gradient"],
)
def test_all_ranks_stop_before_the_step_and_report_step_rate_norm_and_samples(
    here, configure, shared, overrides
):
    job = Job(here, configure, shared / "run", *FLAWED, *overrides)
    loss = r"loss [\d.]+" if GRADIENT in overrides else "loss nan"
    with pytest.raises(NotFiniteError, match=rf"{loss} and gradient norm (nan|inf)") as caught:
        job.part()
    here.comm.barrier()
    output, lines = read(job.directory.metrics), str(caught.value).splitlines()
    assert max(map(len, lines)) < 140
    assert lines[0].startswith("loss and gradients must be finite, but they are not on rank")
    newest = f"step-{output[-1]['step']:08}" if output[-1]["step"] else ""
    assert (
        lines[-1] == f"then {f'continue from {newest}' if newest else 'start again'} with --resume"
    )
    assert "checkpoint" not in "".join(lines)
    (record,) = [r for r in output if r["event"] == "not_finite"]
    assert output[-1] == {"event": "failed", "step": record["step"] - 1, "reason": lines[0]}
    culprits = [r["rank"] for r in record["ranks"] if 13 in r["samples"]]
    assert len(culprits) == 1
    assert f"  rank {culprits[0]}: " in str(caught.value) or GRADIENT in overrides
    assert f"step {record['step']} (epoch 1, learning rate 0.0" in str(caught.value)
    batch = [sample for each in record["ranks"] for sample in each["samples"]]
    assert len(set(batch)) == len(batch) == (8 if record["step"] == 6 else 9)
    kept = last_checkpoint(here, job)
    assert kept.step == record["step"] - 1 == len(hashes(job))
    assert_finite(kept.state["model"])
    found = status(job.directory.path)
    assert (found.state, found.code) == ("failed", 1)
    assert RunPart.after(output).ended_by == "an error"


@ANY
@pytest.mark.parametrize(
    "overrides",
    [FIXED, [GRADIENT], [GRADIENT, "train.shard=node"]],
    ids=["reproducible", "gradient", "shared parameters"],
)
def test_all_ranks_skip_and_count_the_step(here, configure, shared, overrides):
    job = Job(here, configure, shared / "run", *FLAWED, SKIP, "log.every_steps=1", *overrides)
    assert isinstance(job.part(), Outcome)
    here.comm.barrier()
    same = [number for number, (a, b) in enumerate(pairwise(hashes(job)), 2) if a == b]
    records = read(job.directory.metrics)
    skipped = [r["step"] for r in records if r["event"] == "step" and "skipped" in r]
    assert set(same) == set(skipped) - {1}
    assert [step > 6 for step in skipped] == [False, True]
    assert records[-1]["skipped"] == 2
    assert_finite(job.final()["model"])
    assert int(job.final()["model"]["network.0.num_batches_tracked"]) == 12 - 2
    losses = [r["loss"] for r in records if r["event"] == "step"]
    assert [number for number, loss in enumerate(losses, 1) if loss is None] == skipped


@TWO
def test_checks_send_no_bytes(here, configure, shared):
    def sent(mode: str, spike: str = "none") -> list[int]:
        totals: list[int] = []
        look = lambda: totals.append(sum(here.comm.traffic()[:2]))  # noqa: E731
        job = Job(
            here, configure, shared / (mode + spike), "checkpoint.every=none", "train.epochs=1"
        )
        job.config = configure(
            *job.overrides, f"train.on_non_finite={mode}", f"train.on_spike={spike}"
        )
        job.part(at=dict.fromkeys(range(1, 7), look))
        return [later - earlier for earlier, later in pairwise(totals)]

    assert sent("stop") == sent("skip") == sent("ignore") == sent("stop", "skip")


UNSEEN = [
    pytest.param([], "the weights after step", id="next loss"),
    pytest.param(FIXED, "the weights after step", id="reproducible", marks=LONG),
    pytest.param(
        ["checkpoint.every=1"], "saved parameters must be finite", id="checkpoint", marks=LONG
    ),
    pytest.param(["sync.method=local_sgd", "sync.steps=50"], "the weights after step", id="local"),
    pytest.param(["sync.method=local_sgd", "sync.steps=1"], "a mean over replicas", id="mean"),
]


@TWO
@pytest.mark.parametrize(("overrides", "message"), UNSEEN)
def test_an_unchecked_gradient_is_reported_later_with_the_samples_of_its_step(
    here, configure, shared, overrides, message
):
    losses = Job(here, configure, shared / "losses", *FLAWED, *overrides)
    losses.config = configure(*losses.overrides, "checkpoint.every=none")
    with pytest.raises(NotFiniteError, match=r"in step \d+ \(.* samples [\d, ]*13"):
        losses.part()
    job = Job(here, configure, shared / "run", *FLAWED, GRADIENT, "checkpoint.every=none")
    job.config = configure(*job.overrides, *overrides)
    with pytest.raises(NotFiniteError) as caught:
        job.part()
    here.comm.barrier()
    (record,) = [r for r in read(job.directory.metrics) if r["event"] == "not_finite"]
    (before,) = [r for r in read(losses.directory.metrics) if r["event"] == "not_finite"]
    assert message in str(caught.value).splitlines()[0]
    (culprit,) = [r for r in record["ranks"] if 13 in r["samples"]]
    assert culprit["step"] == min(r["step"] for r in before["ranks"] if 13 in r["samples"])
    assert f"  rank {culprit['rank']}: loss {float(culprit['loss']):g} in step" in str(
        caught.value
    )


@TWO
def test_weights_that_are_not_finite_are_never_saved(here, configure, shared):
    """The gradient is not checked, so the weights are infinite after the step."""
    job = Job(here, configure, shared / "run", *FLAWED, GRADIENT)
    with pytest.raises(NotFiniteError, match=r"saved parameters must be finite, but ranks? 0"):
        job.part()
    assert_finite(last_checkpoint(here, job).state["model"])
    late = Job(here, configure, shared / "late", *FLAWED, GRADIENT, "train.epochs=1")
    late.config = configure(*late.overrides, "checkpoint.every=none", "train.global_batch=53")
    with pytest.raises(NotFiniteError, match="saved parameters must be finite"):
        late.part()
    here.comm.barrier()
    assert not (late.directory.checkpoints / "final.pt").exists()


LOCAL = [
    pytest.param([GRADIENT, "train.clip_norm=1", "sync.method=local_sgd"], id="local"),
    pytest.param(["sync.method=post_local_sgd", "sync.args.start=20"], id="post, synchronous"),
    pytest.param(["sync.method=diloco", "sync.steps=50"], id="a long round", marks=LONG),
    pytest.param(["sync.method=hierarchical_local_sgd"], id="nodes", marks=LONG),
    pytest.param(["sync.method=staged_sgd"], id="staged", marks=LONG),
]


@pytest.mark.ranks(2, 3)
@pytest.mark.parametrize("overrides", LOCAL)
def test_local_methods_stop_at_the_next_synchronization(here, configure, shared, overrides):
    job = Job(here, configure, shared / "run", *FLAWED, *overrides)
    with pytest.raises(NotFiniteError, match=r"learning rate 0.0.*samples [\d, ]*13"):
        job.part()
    here.comm.barrier()
    (record,) = [r for r in read(job.directory.metrics) if r["event"] == "not_finite"]
    assert min(r["step"] for r in record["ranks"]) <= record["step"] <= 6
    assert_finite(last_checkpoint(here, job).state["model"])


@pytest.mark.ranks(2, 3)
@pytest.mark.parametrize("overrides", LOCAL)
def test_local_methods_skip_steps_on_one_rank(here, configure, shared, overrides):
    job = Job(here, configure, shared / "run", *FLAWED, SKIP, *overrides)
    assert isinstance(job.part(), Outcome)
    here.comm.barrier()
    # one step per epoch, also in methods with synchronous steps
    assert read(job.directory.metrics)[-1]["skipped"] == 2
    assert_finite(job.final()["model"])


@TWO
def test_a_failed_run_can_resume_with_skip(here, configure, shared):
    whole = Job(here, configure, shared / "whole", *FLAWED, SKIP)
    whole.part()
    parts = Job(here, configure, shared / "parts", *FLAWED)
    with pytest.raises(NotFiniteError):
        parts.part()
    changes = check_same(parts.directory, whole.config, changed=False)
    assert changes == ['train.on_non_finite was "stop", is "skip"']
    parts.config = whole.config
    assert isinstance(parts.part(), Outcome)
    assert_same_bits(dict(whole.final()["model"]), dict(parts.final()["model"]))


@TWO
def test_ignore_continues_with_weights_that_are_not_finite(here, configure, shared):
    ignoring = [*FLAWED, "train.on_non_finite=ignore", "train.epochs=1"]
    job = Job(here, configure, shared / "run", *ignoring)
    job.config = configure(*job.overrides, "train.epochs=1")
    assert isinstance(job.part(), Outcome)
    assert not job.final()["model"]["network.1.weight"].isfinite().any()


def test_a_message_lists_a_few_samples_of_a_few_ranks():
    place = {"step": 7, "epoch": 1, "lr": 0.1, "loss": float("nan"), "norm": 1.0}
    found = {rank: NotFiniteFinding(samples=[*range(64)], **place) for rank in range(100)}
    lines = message_of(found).splitlines()
    assert lines[0].startswith(
        "loss and gradients must be finite, but they are not on ranks 0-99 in step 7"
    )
    assert sum("samples 0, 1, 2, 3, 4, 5, 6, 7 and 56 more" in line for line in lines) == 4
    assert lines[5] == "  and 96 more ranks"
    assert max(map(len, lines)) < 140


EVAL = ["model.target=tests.train.problem:Blind", "train.epochs=2", "checkpoint.every=4"]


@ANY
@pytest.mark.parametrize(
    "overrides", [["test.metric=accuracy"], [*FIXED, "test.metric=loss"]], ids=["", "reproducible"]
)
def test_a_test_loss_that_is_not_finite_ends_all_ranks(here, configure, shared, overrides):
    job = Job(here, configure, shared / "run", *EVAL, *overrides)
    with pytest.raises(NotFiniteError, match=r"of the test after step 6 \(epoch 1\) is nan\n"):
        job.part()
    here.comm.barrier()
    output = read(job.directory.metrics)[-1]
    assert (output["event"], output["step"]) == ("failed", 6)
    assert last_checkpoint(here, job).step == 4
    assert status(job.directory.path).code == 1


@TWO
@pytest.mark.parametrize("mode", ["skip", pytest.param("ignore", marks=LONG)])
def test_with_skip_such_a_test_is_a_warning_and_never_the_best(
    here, configure, shared, mode, caplog
):
    job = Job(here, configure, shared / "run", *EVAL)
    job.config = configure(*job.overrides, *EVAL, f"train.on_non_finite={mode}")
    assert isinstance(job.part(), Outcome)
    message = "of the test after step 6 (epoch 1) is nan: its accuracy is meaningless"
    assert "score" not in last_checkpoint(here, job).facts
    assert (
        caplog.text.count(message) == caplog.text.count("its accuracy is") == (not here.comm.rank)
    )

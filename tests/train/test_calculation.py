"""Keys of [train] that define the computation of a step."""

import pytest
import torch

from hpctrain.core.errors import MismatchError
from hpctrain.core.records import read
from hpctrain.train.evaluation import evaluate
from hpctrain.train.task import build
from tests.train.job import Job, assert_same_bits, assert_same_checkpoint, assert_same_run
from tests.train.problem import NUM_SAMPLES, samples

SINGLE = ["model.args.single=true", "data.args.single=true"]
NOISY = ["model.target=tests.train.problem:noisy_model"]


@pytest.mark.ranks(1, 2, 3)
@pytest.mark.parametrize(
    ("precision", "shard"), [("bf16", "none"), ("fp16", "none"), ("fp16", "node")]
)
def test_in_16_bits_all_ranks_have_the_same_bits_and_skip_the_same_steps(
    here, configure, shared, world, precision, shard
):
    how = [f"train.precision={precision}", f"train.shard={shard}"]
    how += ["loss.target=tests.train.problem:steep", "optimizer.lr=0.002"]
    job = Job(here, configure, shared / "run", *NOISY, *SINGLE, *how, "train.epochs=2")
    task = job.built()
    seen = set[torch.dtype]()
    task.model[2].register_forward_hook(lambda _module, _inputs, output: seen.add(output.dtype))
    job.part(task=task)
    assert seen == {torch.bfloat16 if precision == "bf16" else torch.float16}
    mine = [p.detach() for p in task.model.parameters()]
    assert {p.dtype for p in mine} == {torch.float32}
    everywhere = world.allgather((mine, task.precision.state_dict()))
    for other in everywhere:
        assert_same_bits(list(other), list(everywhere[0]))
    here.comm.barrier()
    records = read(job.directory.metrics)
    if precision == "fp16":
        skipped = records[-1]["skipped"]
        assert 0 < skipped < 12
        assert everywhere[0][1]["scale"] == 2.0 ** (16 - skipped)
    assert records[-1]["metric"] > 0.4
    assert records[-1]["loss"] < next(r for r in records if r["event"] == "test")["loss"]


@pytest.mark.ranks(1, 2)
def test_master_weights_are_stored_stepped_and_restored(here, configure, shared):
    keys = ["model.target=tests.train.problem:Half", "train.epochs=1", "log.every_steps=1"]
    keys += ["train.shard=node", "train.master_dtype=fp32", "optimizer.lr=0.01"]
    whole, parts = (Job(here, configure, shared / name, *keys) for name in ("whole", "parts"))
    task = whole.built()
    whole.part(task=task)
    for p in task.model.parameters():
        master = task.optimizer.state[p]["master"]
        assert (p.dtype, master.dtype) == (torch.bfloat16, torch.float32)
        assert torch.equal(master.to(p.dtype), p)
        assert not torch.equal(master, p.float())
    parts.part(stop="SIGTERM", after=4)
    parts.part()
    assert_same_run(whole, parts)


@pytest.mark.ranks(2)
def test_ema_weights_follow_their_formula_and_are_tested(here, configure, shared):
    job = Job(here, configure, shared / "run", "train.ema=0.8", "train.epochs=2")
    task, weights = job.built(), []
    task.optimizer.register_step_post_hook(
        lambda *_: weights.append([p.detach().clone() for p in task.model.parameters()])
    )
    job.part(task=task)
    average = weights[0]
    for each in weights[1:]:
        average = [0.8 * old + 0.2 * new for old, new in zip(average, each, strict=True)]
    here.comm.barrier()
    final = job.final()
    names = [name for name, _ in task.model.named_parameters()]
    for name, value, last in zip(names, average, weights[-1], strict=True):
        torch.testing.assert_close(final["ema"][name], value, rtol=1e-12, atol=1e-14)
        assert torch.equal(final["model"][name], last)
    assert final["ema"].keys() == final["model"].keys()
    x, y = map(torch.from_numpy, samples().values())
    task.model.load_state_dict(final["ema"])
    with torch.no_grad():
        loss = torch.nn.functional.cross_entropy(task.model.eval()(x), y).item()
    assert read(job.directory.metrics)[-1]["loss"] == pytest.approx(loss, rel=1e-12)


@pytest.mark.ranks(2)
def test_activation_checkpointing_keeps_the_same_bits(here, configure, shared):
    how = ["model.target=tests.train.problem:Late", "model.args.seconds=0.0"]
    jobs, passes = [], []
    for name, patterns in (("plain", "[]"), ("again", '["network*"]')):
        keys = [*how, "train.epochs=1", f"train.activation_checkpointing={patterns}"]
        job = Job(here, configure, shared / name, *keys)
        task, calls = job.built(), []
        task.model.network[1].register_forward_hook(lambda *_, calls=calls: calls.append(1))
        job.part(task=task)
        jobs.append(job)
        passes.append(len(calls))
    assert passes[1] == passes[0] + len(task.train)
    assert_same_run(*jobs)


@pytest.mark.ranks(2, 3)
def test_accumulation_gives_the_same_steps_as_one_batch(here, configure, shared):
    how = ["sync.method=post_local_sgd", "sync.steps=2", "sync.args.start=4", "train.epochs=2"]
    plain, pieces = (
        Job(here, configure, shared / name, *how, f"train.accumulate={name}") for name in "15"
    )
    plain.part()
    pieces.part()
    here.comm.barrier()
    one, two = plain.final()["model"], pieces.final()["model"]
    for name, value in one.items():
        torch.testing.assert_close(two[name], value, rtol=1e-10, atol=1e-12)


@pytest.mark.ranks(2, 3)
@pytest.mark.parametrize(
    "how",
    [
        ["train.precision=fp16", 'optimizer.groups=[{ match = "*.bias", lr = 0.1 }]'],
        ["train.clip_value=0.01", "sync.method=local_sgd", "sync.steps=3"],
    ],
)
def test_a_part_may_start_on_a_step_without_samples_or_after_the_last_step(
    here, configure, shared, how
):
    # The second step of each epoch has one sample, so only one rank has samples.
    how = [*NOISY, *SINGLE, "model.args.norm=false", "train.global_batch=52", *how]
    how += ["train.epochs=3", "checkpoint.keep_best=1"]
    whole, job = (Job(here, configure, shared / name, *how) for name in "ab")
    whole.part()
    for _ in range(2):
        job.part(stop="SIGTERM", after=2)
    job.part()
    assert_same_run(whole, job)
    # including the last test, although the checkpoint was written before that test
    assert_same_checkpoint(whole, job)


INDUCTOR = pytest.mark.requires("c++-compiler"), pytest.mark.conformance


@pytest.mark.ranks(1, 2)
@pytest.mark.parametrize("backend", ["aot_eager", pytest.param("inductor", marks=INDUCTOR)])
def test_a_compiled_model_gives_the_same_result_with_the_same_names(
    here, configure, shared, backend
):
    how = ["train.global_batch=20", "train.epochs=2"]
    compiled = f'train.compile_args={{ backend = "{backend}" }}'
    plain = Job(here, configure, shared / "plain", *how)
    other = Job(here, configure, shared / "compiled", *how, "train.compile=true", compiled)
    plain.part()
    task = other.built()
    other.part(task=task)
    assert task.model._compiled_call_impl is not None
    here.comm.barrier()
    one, two = plain.final()["model"], other.final()["model"]
    assert one.keys() == two.keys()
    for name, value in one.items():
        torch.testing.assert_close(two[name], value, rtol=1e-10, atol=1e-12)


def test_parameter_groups_follow_the_schedule_from_their_own_peaks(here, configure, shared):
    groups = 'optimizer.groups=[{ match = "*.bias", lr = 0.4 }]'
    how = [groups, "optimizer.lr=0.1", "schedule.name=linear", "train.epochs=1"]
    job = Job(here, configure, shared / "run", *how)
    task, seen = job.built(), []
    task.optimizer.register_step_pre_hook(
        lambda *_: seen.append([group["lr"] for group in task.optimizer.param_groups])
    )
    job.part(task=task)
    assert seen == [[0.1 * task.schedule(step), 0.4 * task.schedule(step)] for step in range(6)]


@pytest.mark.ranks(1, 2)
def test_gradients_are_clipped_by_norm_then_by_value(here, configure):
    config = configure("train.clip_norm=0.05", "train.clip_value=0.01", "optimizer.lr=1")
    task = build(config, here.comm)
    seen = []
    task.optimizer.register_step_pre_hook(
        lambda *_: seen.extend(p.grad.clone() for p in task.model.parameters())
    )
    from tests.train.test_task import step  # noqa: PLC0415

    step(task)
    assert max(gradient.abs().max().item() for gradient in seen) == 0.01
    assert torch.linalg.vector_norm(torch.cat([g.flatten() for g in seen])).item() <= 0.05


@pytest.mark.ranks(1, 2, 3, 4)
def test_metrics_equal_those_of_one_process(here, configure):
    names = '["f1", "accuracy", "top2", "loss", "tests.train.problem:distance"]'
    task = build(configure("train.global_batch=3", f"test.metric={names}"), here.comm)
    scores = evaluate(task)
    x, y = map(torch.from_numpy, samples().values())
    with torch.no_grad():
        output = task.model.eval()(x)
    answer = output.argmax(dim=1)
    assert [*scores.metrics] == ["f1", "accuracy", "top2", "loss", "distance"]
    assert scores.metric == scores.metrics["f1"]
    of_classes = []
    for number in range(output.shape[1]):
        answered, labelled = answer == number, y == number
        hits = (answered & labelled).sum()
        precision, recall = hits / answered.sum(), hits / labelled.sum()
        f1 = 2 * precision * recall / (precision + recall)
        of_classes.append(f1.nan_to_num().item())
    assert scores.metric == pytest.approx(sum(of_classes) / len(of_classes), rel=1e-6)
    assert scores.metrics["accuracy"] == (answer == y).sum().item() / NUM_SAMPLES
    assert scores.metrics["top2"] == (output.argmin(dim=1) != y).sum().item() / NUM_SAMPLES
    distance = output.gather(1, y[:, None]).abs().mean().item()
    assert scores.metrics["distance"] == pytest.approx(distance, rel=1e-12)


@pytest.mark.parametrize(
    ("overrides", "message"),
    [
        (
            ["train.activation_checkpointing=['l*']"],
            "matches none of 5 names, such as 0, 1, 2",
        ),
        (["train.compile=true", "train.compile_args={ mod = 'x' }"], "did you mean mode?"),
        (["train.compile=true", "train.compile_args={ backend = 'no' }"], "compile refuses: "),
        (
            ["optimizer.name=LBFGS"],
            "uses one gradient per step, but LBFGS computes several",
        ),
        (["test.metric=['accuracy', 'f2']"], "test.metric must be accuracy, loss, f1, auc, top5"),
    ],
)
def test_invalid_options_of_a_step_are_reported(here, configure, overrides, message):
    with pytest.raises(MismatchError) as caught:
        build(configure(*overrides), here.comm)
    assert message in str(caught.value)

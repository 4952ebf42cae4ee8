import itertools
import re
import sys

import pytest
import torch

from hpctrain.core.errors import ConfigError, DataError, MismatchError
from hpctrain.core.target import call, make_importable, resolve
from hpctrain.gradients.optimizer_exchange import exchange_of
from hpctrain.gradients.sharded_step import ShardedStep
from hpctrain.train.evaluation import evaluate
from hpctrain.train.finite import StepGuard
from hpctrain.train.loop import train_step
from hpctrain.train.metrics import Metrics
from hpctrain.train.model import make_schedule
from hpctrain.train.task import build
from tests.train.job import Job
from tests.train.problem import NUM_SAMPLES

UNCHANGED = "tests.train.problem:unchanged"


@pytest.mark.ranks(1, 2, 3, 4)
def test_ranks_start_with_the_same_weights_and_different_random_numbers(here, configure, world):
    task = build(configure(), here.comm)
    weights = torch.cat([p.detach().view(-1) for p in task.model.parameters()])
    assert len(set(world.allgather(weights.numpy().tobytes()))) == 1
    assert len(set(world.allgather(torch.rand(1).item()))) == world.size


@pytest.mark.ranks(1, 3)
def test_steps_and_samples_follow_from_the_global_batch(here, configure):
    task = build(configure("train.global_batch=10", "train.epochs=4"), here.comm)
    assert (len(task.train), task.num_steps, task.num_train_samples) == (6, 24, NUM_SAMPLES)
    assert task.exchange.num_parameters == sum(p.numel() for p in task.model.parameters())


UNFIT = [
    (
        "loss.target={}:loss_of_each",
        'loss.target = "{}:loss_of_each" must return one number for a',
    ),
    ("model.target={}:Pair", 'loss.target = "cross_entropy" refuses a tuple of float64 ('),
    ("model.target={}:float_model", 'model.target = "{}:float_model" refuses float64 ('),
    ("model.target={}:two_classes", 'loss.target = "cross_entropy" refuses float64 ('),
    (
        "data.transform={}:shorter",
        "a transform must keep x and y of every sample as tensors, but {}:shorter",
    ),
    ("data.transform={}:without_labels", "{}:without_labels returned x float64"),
]


@pytest.mark.ranks(1, 3)
def test_a_mismatch_is_one_error_of_all_ranks_in_the_first_step(here, configure, shared):
    for number, texts in enumerate(UNFIT):
        override, message = (text.format("tests.train.problem") for text in texts)
        job = Job(here, configure, shared / str(number), override)
        with pytest.raises((DataError, MismatchError)) as caught:
            job.part()
        assert message in str(caught.value)
        assert len(set(here.comm.allgather_object(str(caught.value)))) == 1
        assert here.comm.size == 1 or isinstance(caught.value, MismatchError)


@pytest.mark.parametrize(
    ("override", "message"),
    [
        ("model.target=tests.train.problem:modle", "did you mean model?"),
        ("model.target=tests.train.problem:no_model", "returned int"),
        ("model.args.widht=3", "did you mean width?"),
        ("data.args={}", "missing a required argument: 'folder'"),
        ("data.input=image", 'data.input must be a field of the data, x, y, got "image"'),
        ("data.label=z", 'data.label must be a field of the data, x, y, got "z"'),
        ("test.metric=tests.train.problem:NUM_SAMPLES", "must name a function, got an object"),
        ("loss.target=cross_entrop", "did you mean cross_entropy?"),
        ("loss.args.smoothing=0.1", "loss.args: cross_entropy"),
        ("optimizer.name=SDG", "did you mean SGD?"),
        ("optimizer.name=lr_scheduler", "optimizer.name"),
        ("optimizer.args.momentun=0.1", "did you mean momentum?"),
        (
            "optimizer.args.nesterov=true",
            "optimizer.args must be valid, but SGD refuses: Nesterov momentum",
        ),
        (
            'optimizer.groups=[{ match = "*.bia" }]',
            'optimizer.groups: patterns must match a name, but "*.bia" matches none of 4',
        ),
        ('optimizer.groups=[{ match = "*.bia" }]', "such as 4.bias, 1.bias"),
        ('optimizer.groups=[{ match = "*", momentun = 0 }]', "did you mean momentum?"),
        (
            "schedule.name=step",
            "name must be one of constant, linear, cosine, poly, inverse_time, got 'step'",
        ),
        ("schedule.args.finall=0.1", "did you mean final?"),
        ("schedule.args.final=low", "schedule.args must be valid, but cosine refuses"),
        ("test.metric=precision", "test.metric must be accuracy, loss"),
    ],
)
def test_a_mistake_in_the_configuration_is_reported_with_a_remedy(
    here, configure, override, message
):
    with pytest.raises(MismatchError) as caught:
        build(configure(override), here.comm)
    assert message in str(caught.value)


BIASES = '{ match = "*.bias", lr = 0.5, momentum = 0.0 }'
LAST = '{ match = ["4.weight", "4.*"], weight_decay = 0.25 }'


@pytest.mark.ranks(1, 2)
def test_parameters_that_match_a_pattern_have_their_own_arguments(here, configure):
    args = "optimizer.args={ momentum = 0.9, weight_decay = 0.1 }"
    config = configure(
        args,
        "schedule.name=linear",
        "model.args.norm=true",
        f"optimizer.groups=[{BIASES}, {LAST}]",
        "optimizer.exempt_norms_and_biases=true",
        "optimizer.lr=0.2",
    )
    task = build(config, here.comm)
    names = {id(p): name for name, p in task.model.named_parameters()}
    found = {
        names[id(p)]: (group["lr"], group["momentum"], group["weight_decay"])
        for group in task.optimizer.param_groups
        for p in group["params"]
    }
    assert found == {
        "0.weight": (0.2, 0.9, 0.0),
        "0.bias": (0.5, 0.0, 0.0),
        "1.weight": (0.2, 0.9, 0.1),
        "1.bias": (0.5, 0.0, 0.0),
        "4.weight": (0.2, 0.9, 0.25),
        "4.bias": (0.5, 0.0, 0.0),
    }
    plain = build(configure(), here.comm)
    assert [[*group["params"]] for group in plain.optimizer.param_groups] == [
        [*plain.model.parameters()]
    ]


def step(task):
    """Take the first step; return its loss."""
    loss, _, _ = train_step(task, next(iter(task.train)), StepGuard(task, Metrics(None)))
    return loss


@pytest.mark.parametrize("dtype", ["<i4", "|b1", "<u2"])
def test_label_types_that_torch_rejects_are_reported(here, configure, dtype):
    task = build(configure(f"data.args.label_type={dtype}"), here.comm)
    with pytest.raises(MismatchError, match=r"refuses .* Long or Byte, but got"):
        step(task)


def test_labels_in_bytes_are_accepted(here, configure):
    task = build(configure("data.args.label_type=|u1"), here.comm)
    assert step(task) > 0


@pytest.mark.ranks(1, 2)
def test_the_test_transform_defaults_to_the_training_transform(here, configure):
    problem = "tests.train.problem"
    made = ("data.input=image", f"data.transform={problem}:renamed")
    task = build(configure(*made), here.comm)
    assert evaluate(task).num_samples == NUM_SAMPLES
    plain = build(configure(), here.comm)
    for more, factor in [((), 2), ((f"data.test_transform={problem}:renamed_for_test",), 1)]:
        task = build(configure(*made, *more), here.comm)
        for batch, want in zip(task.test, plain.test, strict=True):
            assert torch.equal(batch.image, want.x * factor)
    with pytest.raises(MismatchError, match='a field of the data, x, y, got "image"'):
        build(configure(*made, "data.test_transform=none"), here.comm)
    unchanged = build(
        configure(f"data.transform={UNCHANGED}", "data.test_transform=none"), here.comm
    )
    assert evaluate(unchanged).num_samples == NUM_SAMPLES


@pytest.mark.parametrize("target", ["no_data", "broken_data"])
def test_data_must_be_two_data_sets(here, configure, target):
    wrong = configure(f"data.target=tests.train.problem:{target}", "data.args={}")
    with pytest.raises(MismatchError, match=r"return two data sets|disk of this rank"):
        build(wrong, here.comm)


@pytest.mark.ranks(2, 3, 4)
def test_an_error_of_one_rank_is_raised_on_all_with_its_rank(here, configure):
    wrong = configure("data.target=tests.train.problem:broken_data", "data.args={}")
    with pytest.raises(MismatchError, match=f"rank {here.comm.size - 1}: the disk of this rank"):
        build(wrong, here.comm)


@pytest.mark.parametrize(
    ("overrides", "message"),
    [
        (["sync.args.stat=reset"], "sync.args: LocalSGD got an unexpected .* did you mean state?"),
        (
            ["sync.args.state=lost"],
            "local_sgd refuses: state must be one of local, average, reset",
        ),
        (["sync.args.most=many"], r"\[sync\] must be valid, but local_sgd refuses: .*'str'"),
        (["sync.method=diloco", "sync.args.outer_lr=-1"], "outer_lr must be above 0, got -1"),
        (
            ["sync.method=post_local_sgd", "sync.args={start = 3, start_epochs = 1}"],
            "has start_epochs=1 and start=3; leave one out",
        ),
        (
            ["sync.method=staged_sgd", "sync.args.warmup_epochs=-1"],
            "sync.args.warmup_epochs must be at least 0, got -1",
        ),
        (
            ["sync.method=staged_sgd", "sync.args={warmup_epochs = 3, cooldown_epochs = 2}"],
            "warmup_steps must be at most cooldown_start=12, got 18",
        ),
    ],
)
@pytest.mark.ranks(1, 2)
def test_invalid_options_of_a_method_are_rejected_on_all_ranks(
    here, configure, overrides, message
):
    config = configure(
        "train.global_batch=9", "train.epochs=4", "sync.method=local_sgd", *overrides
    )
    with pytest.raises(MismatchError, match=message):
        build(config, here.comm)


@pytest.mark.ranks(3)
def test_local_methods_need_a_sample_on_each_rank(here, configure):
    with pytest.raises(MismatchError, match=r"each of 3 ranks a sample .* got 2;"):
        build(configure("train.global_batch=2", "sync.method=diloco"), here.comm)


def schedule_of(configure, epoch_steps, epochs, **keys):
    overrides = [f"schedule.{key}={value}" for key, value in keys.items()]
    overrides += ["train.global_batch=64", f"train.epochs={epochs}"]
    return make_schedule(configure(*overrides), epoch_steps)


@pytest.mark.parametrize("name", ["constant", "linear", "cosine", "poly", "inverse_time"])
def test_the_rate_rises_to_its_peak_in_the_warm_up_and_falls_afterwards(configure, name):
    at = schedule_of(configure, 10, 10, name=name, warmup_epochs=2)
    rates = [at(step) for step in range(100)]
    assert rates[:20] == pytest.approx([(step + 1) / 21 for step in range(20)])
    assert all(a >= b for a, b in itertools.pairwise(rates[20:]))
    assert max(rates) == rates[20] == 1.0
    assert [at(7), at(99)] == [rates[7], rates[99]]
    longer = schedule_of(configure, 1, 10, name=name, warmup_epochs=50)
    assert longer(9) == pytest.approx(10 / 51)


@pytest.mark.parametrize(
    ("name", "args", "middle", "last"),
    [
        ("linear", "{ final = 0.1 }", 0.55, 0.1),
        ("cosine", "{ final = 0.1 }", 0.55, 0.1),
        ("poly", "{}", 0.25, 0.0),
        ("poly", "{ power = 1 }", 0.5, 0.0),
        ("inverse_time", "{ decay = 4 }", 1 / 3, 0.2),
    ],
)
def test_each_schedule_follows_its_formula(configure, name, args, middle, last):
    at = schedule_of(configure, 10, 10, name=name, args=args)
    assert [at(0), at(50), at(100)] == pytest.approx([1.0, middle, last])


@pytest.mark.parametrize("name", ["linear", "cosine"])
@pytest.mark.parametrize(("scaling", "factor"), [("linear", 4.0), ("square_root", 2.0)])
def test_a_rate_is_scaled_to_the_batch_and_warmed_up_from_the_unscaled_rate(
    configure, name, scaling, factor
):
    """Batches have 64 samples, and the rate is for 16."""
    how = {"name": name, "args": "{ final = 0.5 }", "base_batch": 16, "scaling": scaling}
    at = schedule_of(configure, 10, 10, warmup_epochs=2, **how)
    rises = [1 + (factor - 1) * step / 20 for step in range(21)]
    assert [at(step) for step in range(21)] == pytest.approx(rises)
    assert at(100) == pytest.approx(factor / 2)
    smaller = schedule_of(configure, 10, 10, warmup_epochs=1, **{**how, "base_batch": 256})
    assert [smaller(0), smaller(10)] == pytest.approx([1 / factor / 11, 1 / factor])


@pytest.fixture
def folder(tmp_path, monkeypatch):
    monkeypatch.setattr(sys, "path", sys.path.copy())
    (tmp_path / "mine_for_targets.py").write_text(
        "def model(width, depth=1):\n    return width * depth\n_hidden = 3\nvalue = 3\n"
    )
    (tmp_path / "broken_for_targets.py").write_text("import no_such_package_at_all\n")
    make_importable(tmp_path)
    yield tmp_path
    sys.modules.pop("mine_for_targets", None)


def test_a_module_next_to_the_configuration_is_found_first(folder):
    assert resolve("mine_for_targets:model", "model.target")(3) == 3
    assert sys.path[0] == str(folder)


@pytest.mark.parametrize(
    ("target", "message"),
    [
        ("", 'model.target must be "module:function", got ""'),
        ("mine_for_targets", 'must be "module:function", got "mine_for_targets"'),
        ("nowhere_at_all:f", "there is no module nowhere_at_all; put it next to"),
        ("broken_for_targets:f", "cannot be imported: No module named 'no_such_package_at_all'"),
        ("mine_for_targets:modle", "mine_for_targets has no modle; did you mean model?"),
    ],
)
@pytest.mark.usefixtures("folder")
def test_an_invalid_target_is_reported_with_the_missing_part(target, message):
    with pytest.raises(ConfigError) as caught:
        resolve(target, "model.target")
    assert message in str(caught.value)


def test_an_error_inside_the_users_module_is_not_hidden(folder):
    (folder / "raising_for_targets.py").write_text("1 / 0\n")
    with pytest.raises(ZeroDivisionError):
        resolve("raising_for_targets:f", "model.target")


def test_positional_arguments_are_not_suggested():
    def loss(output, label, *, smoothing=0.0):
        return output, label, smoothing

    with pytest.raises(ConfigError, match="did you mean smoothing"):
        call(loss, (1, 2), {"smothing": 1}, "loss.args")


@pytest.mark.ranks(2)
@pytest.mark.parametrize(
    ("overrides", "chosen", "reason"),
    [
        ([], "node", "for up to 2 ranks"),
        (
            ["optimizer.name=AdamW", "train.clip_norm=1"],
            "node",
            "parameters and state are stored once",
        ),
        (["train.precision=fp16"], "node", "for up to 2 ranks"),
        (["sync.compression=int8"], "none", "sync.compression is not none"),
        (["train.reproducible=true"], "none", "reproducible"),
        (["sync.method=local_sgd"], "none", "sync.method is local_sgd"),
        (["optimizer.name=Adafactor"], "node", "for up to 2 ranks"),
        (["optimizer.name=SparseAdam"], "none", "SparseAdam may combine several parameters"),
    ],
    ids=str,
)
@pytest.mark.requires("own-engine")
def test_auto_shards_if_all_options_allow_it_and_gives_the_reason(
    here, configure, overrides, chosen, reason
):
    task = build(configure("train.shard=auto", *overrides), here.comm)
    assert task.config.train.shard == chosen
    assert reason in task.shard_reason
    assert isinstance(exchange_of(task.optimizer), ShardedStep) == (chosen == "node")


@pytest.mark.ranks(1, 2, 3)
@pytest.mark.parametrize("sync", [[], ["sync.method=local_sgd", "sync.steps=2"]])
def test_a_batch_larger_than_the_data_is_rejected_with_a_size_that_works(here, configure, sync):
    asked = ["train.global_batch=54", *sync]
    with pytest.raises(MismatchError, match="got 54 for 53 samples") as caught:
        build(configure(*asked), here.comm)
    remedy = re.search(r"--set (train.global_batch=\d+)", str(caught.value))[1]
    assert build(configure(*asked, remedy), here.comm).num_steps > 0

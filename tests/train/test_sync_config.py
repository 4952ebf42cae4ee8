"""What ``[sync]`` refuses: it says the rule, the values and the way out, on all ranks."""

import pytest

from hpctrain.core.errors import ConfigError, MismatchError
from hpctrain.train.task import build


@pytest.mark.parametrize(
    ("overrides", "message"),
    [
        (["sync.method=staged_sgd", "sync.steps=auto"], "which changes it by the loss"),
        (["sync.method=diloco", "sync.args.steps=3"], "write steps and compression beside it"),
        (["sync.method=diloco", "train.reproducible=true"], "leave one of them out, got 'diloco'"),
        (["sync.method=diloco", "data.on_corrupt=skip"], "or set sync.method = synchronous"),
    ],
)
def test_what_cannot_go_together_is_refused(configure, overrides, message):
    with pytest.raises(ConfigError, match=message):
        configure(*overrides)


@pytest.mark.parametrize(
    ("overrides", "message"),
    [
        (["sync.args.stat=reset"], "sync.args: LocalSGD got an unexpected .* did you mean state?"),
        (["sync.args.state=lost"], "local_sgd refuses: state is one of local, average, reset"),
        (["sync.args.most=many"], r"\[sync\] local_sgd refuses: .*'str'"),
        (["sync.method=diloco", "sync.args.outer_lr=-1"], "outer_lr must be above 0, got -1"),
        (
            ["sync.method=post_local_sgd", "sync.args={start = 3, start_epochs = 1}"],
            "got start_epochs=1 and start=3; leave one out",
        ),
        (
            ["sync.method=staged_sgd", "sync.args.warmup_epochs=-1"],
            "sync.args.warmup_epochs is a number of epochs, at least 0, got -1",
        ),
        (
            ["sync.method=staged_sgd", "sync.args={warmup_epochs = 3, cooldown_epochs = 2}"],
            "warm-up ends before cool-down begins, got warmup_steps=18, cooldown_start=12",
        ),
    ],
)
@pytest.mark.ranks(1, 2)
def test_what_a_method_does_not_take_is_refused_on_all_ranks(here, configure, overrides, message):
    config = configure(
        "train.global_batch=9", "train.epochs=4", "sync.method=local_sgd", *overrides
    )
    with pytest.raises(MismatchError, match=message):
        build(config, here.comm)


@pytest.mark.ranks(3)
def test_each_rank_must_have_a_sample(here, configure):
    with pytest.raises(MismatchError, match=r"each of 3 ranks a sample, .* got 2 of 53 samples"):
        build(configure("train.global_batch=2", "sync.method=diloco"), here.comm)

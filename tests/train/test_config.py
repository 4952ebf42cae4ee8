import pytest

from hpctrain.core.errors import ConfigError
from hpctrain.train.config import (
    CommConfig,
    LogConfig,
    OptimizerConfig,
    RunConfig,
    ScheduleConfig,
    TestConfig,
    TrainingConfig,
)


def test_the_run_directory_is_named_after_the_run_unless_it_is_given():
    assert str(RunConfig(name="a").directory) == "runs/a"
    assert str(RunConfig(name="a", output_dir="/b/c").directory) == "/b/c"


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda: OptimizerConfig(lr=0.0), "optimizer.lr must be positive, got 0.0"),
        (lambda: OptimizerConfig(lr=float("nan")), "optimizer.lr must be positive, got nan"),
        (
            lambda: ScheduleConfig(warmup_epochs=-1.0),
            "schedule.warmup_epochs must not be negative",
        ),
        (lambda: TrainingConfig(epochs=0), "train.epochs must be at least 1, got 0"),
        (lambda: TrainingConfig(global_batch=0), "train.global_batch must be at least 1, got 0"),
        (lambda: TrainingConfig(clip_norm=-1.0), "train.clip_norm must not be negative"),
        (lambda: TestConfig(every_epochs=0), "test.every_epochs must be at least 1"),
        (lambda: LogConfig(every_steps=0), "log.every_steps must be at least 1"),
        (lambda: CommConfig(overlap="no"), "comm.overlap is one of auto, thread, inline, end"),
        (lambda: CommConfig(bucket_size="0 B"), "comm.bucket_size must be positive, got '0 B'"),
        (lambda: CommConfig(bucket_size="big"), "comm.bucket_size: a size is a number"),
        (lambda: RunConfig(name="a/b"), "name is a plain word"),
        (lambda: RunConfig(name=""), "name is a plain word"),
        (lambda: RunConfig(seed=-1), "seed is between"),
    ],
)
def test_a_value_out_of_range_names_its_key_and_the_rule(make, message):
    with pytest.raises(ConfigError, match="^" + message):
        make()

"""What no method takes is refused, with the rule and the value."""

import pytest

from hpctrain.core.errors import ConfigError
from tests.gradients.training import make_model, sgd
from tests.local_sgd.local_methods import train

STAGED = {"warmup_steps": 3, "cooldown_start": 15}
WRONG = [
    ("LocalSGD", {"steps": 0}, "at least 1 step"),
    ("LocalSGD", {"steps": "often"}, '"auto"'),
    ("LocalSGD", {"state": "mean"}, "local, average, reset"),
    ("LocalSGD", {"steps": "auto", "share": 1.5}, "between 0 and 1"),
    ("LocalSGD", {"steps": "auto", "most": 0}, "most=0"),
    ("PostLocalSGD", {"start": -1}, "lr_drop"),
    ("PostLocalSGD", {"start": "soon"}, "lr_drop"),
    ("HierarchicalLocalSGD", {"node_steps": 0}, "node_steps"),
    ("DiLoCo", {"outer_lr": 0.0}, "outer_lr"),
    ("DiLoCo", {"outer_momentum": 1.0}, "outer_momentum"),
    ("DiLoCo", {"fragments": 0}, "fragments"),
    ("DiLoCo", {"fragments": 7}, "7"),
    ("DiLoCo", {"delay": -1}, "delay"),
    ("DiLoCo", {"keep": 1.0}, "keep"),
    ("StagedSGD", STAGED | {"warmup_steps": 16}, "warm-up ends before"),
    ("StagedSGD", STAGED | {"steps": 0}, "steps"),
    ("StagedSGD", STAGED | {"steps": 4, "delay": 5}, "delay=5"),
    ("StagedSGD", STAGED | {"patience": 0}, "patience"),
    ("StagedSGD", STAGED | {"threshold": 1.0}, "threshold"),
]


@pytest.mark.ranks(1)
@pytest.mark.parametrize(("name", "options", "message"), WRONG, ids=str)
def test_arguments_that_cannot_be_are_refused(hvd_nodes, name, options, message):
    model = make_model()
    with pytest.raises(ConfigError, match=message):
        getattr(hvd_nodes, name)(model, sgd(model), **options)


@pytest.mark.ranks(1)
def test_a_round_that_is_too_short_for_its_fragments_is_refused(hvd_nodes):
    model = make_model()
    optimizer = sgd(model)
    method = hvd_nodes.DiLoCo(model, optimizer, 2, fragments=3)
    with pytest.raises(ConfigError, match="steps=2, fragments=3"):
        train(hvd_nodes, model, optimizer, method, 0, 1)


@pytest.mark.ranks(1, 2)
def test_an_optimizer_is_plain_and_has_one_method_at_a_time(hvd_nodes):
    model = make_model()
    optimizer = sgd(model)
    with (
        hvd_nodes.LocalSGD(model, optimizer, 2),
        pytest.raises(ConfigError, match="DiLoCo comes beside LocalSGD"),
    ):
        hvd_nodes.DiLoCo(model, optimizer, 2)
    method = hvd_nodes.DiLoCo(model, optimizer, 2)
    train(hvd_nodes, model, optimizer, method, 0, 2)
    hvd_nodes.DistributedOptimizer(optimizer, model.named_parameters())
    with pytest.raises(ConfigError, match="leave DistributedOptimizer out"):
        train(hvd_nodes, model, optimizer, method, 0, 1)
    method.close()
    with pytest.raises(ConfigError, match="leave DistributedOptimizer out"):
        hvd_nodes.LocalSGD(model, optimizer)

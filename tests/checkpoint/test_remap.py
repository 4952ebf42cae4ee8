"""A state is carried over to other names and more rows, and the optimizer's state goes with it."""

from copy import deepcopy

import pytest
import torch

from hpctrain.checkpoint.tools.remap import Pad, Remap, remap, remap_optimizer, remap_state
from hpctrain.core.errors import CheckpointError


class Tagger(torch.nn.Module):
    """Embeds words and scores tags; its parts have names that a test chooses."""

    def __init__(self, num_words, names=("words", "tags"), make=torch.optim.AdamW):
        super().__init__()
        layers = {
            names[0]: torch.nn.Embedding(num_words, 4),
            names[1]: torch.nn.Linear(4, 3),
        }
        for name in sorted(layers):
            self.add_module(name, layers[name])
        self.names = names
        self.optimizer = make(self.parameters())

    def step(self, words):
        self.optimizer.zero_grad()
        found = getattr(self, self.names[1])(getattr(self, self.names[0])(words))
        found.square().sum().backward()
        self.optimizer.step()
        return found


def shapes(model):
    return {name: p.shape for name, p in model.named_parameters()}


def names(model):
    return [name for name, _ in model.named_parameters()]


def adagrad(parameters):
    return torch.optim.Adagrad(parameters, lr=0.1)


def momentum(parameters):
    return torch.optim.SGD(parameters, lr=0.1, momentum=0.9)


PLAN = Remap(
    renames={"words.weight": "zz.weight"},
    patterns={r"tags\.(.*)": r"aa.\1"},
    pads={"zz.weight": Pad(9)},
)


@pytest.mark.parametrize("make", [torch.optim.AdamW, adagrad, momentum])
def test_a_carried_over_run_goes_on_bit_for_bit(make):
    torch.manual_seed(0)
    words = torch.tensor([[0, 1], [5, 2]])
    old = Tagger(6, make=make)
    for _ in range(3):
        old.step(words)

    new = Tagger(9, names=("zz", "aa"), make=make)  # its parameters come in another order
    state = {"model": old.state_dict(), "optimizer": old.optimizer.state_dict(), "step": 3}
    state = remap_state(deepcopy(state), PLAN, before=names(old), after=names(new))
    assert state["step"] == 3
    new.load_state_dict(state["model"])
    new.optimizer.load_state_dict(state["optimizer"])
    for _ in range(3):
        assert torch.equal(old.step(words), new.step(words))
    for key, value in old.optimizer.state[old.words.weight].items():
        kept = new.optimizer.state[new.zz.weight][key]
        assert torch.equal(kept[:6] if kept.ndim else kept, value)
        assert not kept.ndim or not kept[6:].any()


def test_groups_and_names_of_parameters_are_kept():
    old = torch.nn.ModuleDict({"a": torch.nn.Linear(2, 2), "b": torch.nn.Linear(2, 2)})
    optimizer = torch.optim.SGD(
        [{"params": [*old["a"].named_parameters()], "lr": 1.0},
         {"params": [*old["b"].named_parameters()], "lr": 2.0}]
    )  # fmt: skip
    plan = Remap(patterns={"a(.*)": r"c\1"})
    after = ["c.weight", "c.bias", "b.weight", "b.bias", "d.weight"]
    state = remap_optimizer(optimizer.state_dict(), plan, before=shapes(old), after=after)
    assert [group["params"] for group in state["param_groups"]] == [[0, 1], [2, 3, 4]]
    assert [group["lr"] for group in state["param_groups"]] == [1.0, 2.0]
    assert state["param_groups"][1]["param_names"] == ["b.weight", "b.bias", "d.weight"]


def test_exact_names_go_before_patterns_and_the_first_pattern_wins():
    plan = Remap(renames={"a.x": "exact"}, patterns={r"a\.(.)": r"first.\1", r"(.*)x": "second"})
    tensors = {name: torch.zeros(1) for name in ("a.x", "a.y", "bx", "b.xy")}
    assert list(remap(tensors, plan)) == ["exact", "first.y", "second", "b.xy"]


@pytest.mark.parametrize(
    ("fill", "rows"),
    [(0.0, 0.0), (2.5, 2.5), (lambda old: old.mean(0), 1.0)],
    ids=["zero", "number", "mean"],
)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_added_rows_are_filled_as_told_and_old_ones_stay(fill, rows, dtype):
    old = torch.tensor([[0.0, 0.0], [2.0, 2.0]], dtype=dtype)
    new = remap({"w": old}, Remap(pads={"w": Pad(5, fill)}))["w"]
    assert new.dtype == dtype
    assert torch.equal(new[:2], old)
    assert torch.equal(new[2:], torch.full((3, 2), rows, dtype=dtype))
    assert old.shape == (2, 2)


def test_every_fault_of_a_plan_is_told_at_once():
    plan = Remap(
        renames={"gone": "x", "a": "b"},
        pads={"none": Pad(3), "b": Pad(1), "n": Pad(2)},
    )
    tensors = {"a": torch.zeros(2), "b": torch.zeros(2), "n": torch.tensor(1.0)}
    with pytest.raises(CheckpointError) as caught:
        remap(tensors, plan)
    lines = str(caught.value).splitlines()
    assert "5 names to correct" in lines[0]
    assert [line.split(":")[0].strip() for line in lines[1:]] == ["gone", "b", "none", "b", "n"]


def test_a_pattern_that_is_none_is_told():
    with pytest.raises(CheckpointError, match=r"regular expressions, got '\('"):
        Remap(patterns={"(": "x"})
    with pytest.raises(CheckpointError, match="cannot replace"):
        remap({"a": torch.zeros(1)}, Remap(patterns={"a": r"\1"}))


def test_names_that_do_not_fit_the_optimizer_are_told():
    old = Tagger(3)
    state = old.optimizer.state_dict()
    with pytest.raises(CheckpointError, match="is of 3 parameters, 1 names are given"):
        remap_optimizer(state, Remap(), before={"w": (3, 4)}, after=["w"])
    with pytest.raises(CheckpointError, match="x: a parameter, not in the state"):
        remap_state({"model": {}}, Remap(), before=["x"], after=[])
    with pytest.raises(CheckpointError, match=r"1 name to correct:\n  tags.bias: not among"):
        remap_optimizer(state, Remap(), before=shapes(old), after=["words.weight", "tags.weight"])

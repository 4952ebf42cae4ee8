"""Recomputation in backward gives the same results and needs less memory."""

import pickle

import pytest
import torch
from torch import nn
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor.parallel import loss_parallel
from torch.nn.functional import dropout
from torch.nn.utils import clip_grad_norm_
from torch.profiler import profile

from hpctrain import ConfigError
from hpctrain.parallel import Pipeline, build_mesh, recompute, tensor_parallel
from tests.parallel.conftest import started
from tests.parallel.training import CLIP, adamw, batches, check, lm, loss_of, transformer


class Dropping(nn.Module):
    """Attention with explicit scores, and dropout."""

    def __init__(self):
        super().__init__()
        self.into, self.out = nn.Linear(32, 96), nn.Linear(32, 32)

    def forward(self, x):
        query, key, value = self.into(x).chunk(3, -1)
        scores = (query @ key.mT).softmax(-1)
        return x + dropout(self.out(scores @ value), 0.5)


def kept_bytes(model, given):
    """Return three values: the bytes that forward keeps, the output, and the gradients."""
    torch.manual_seed(5)
    with profile(profile_memory=True) as memory:
        out = model(given)
    out.square().sum().backward()
    kept = sum(each.self_cpu_memory_usage for each in memory.events())
    return kept, out.detach(), [p.grad for p in model.parameters()]


@pytest.mark.parametrize("make", [Dropping, lambda: lm.Block(32, 4).double()])
def test_results_are_the_same_and_less_memory_is_kept(make):
    dtype = next(make().parameters()).dtype
    given = torch.randn(4, 128, 32, dtype=dtype).requires_grad_()
    found = []
    for how in (None, True, False):
        torch.manual_seed(4)
        model = nn.Sequential(*(make() for _ in range(3)))
        names = [name for name, _ in model.named_parameters()]
        if how is not None:
            assert recompute(recompute(model, ["*"]), ["*"], selective=how) is model
        assert names == [name for name, _ in model.named_parameters()]
        found.append(kept_bytes(pickle.loads(pickle.dumps(model)), given))
    for _, out, gradients in found[1:]:
        assert torch.equal(out, found[0][1])
        for one, other in zip(gradients, found[0][2], strict=True):
            torch.testing.assert_close(one, other, rtol=1e-12, atol=0)
    all_bytes, some, least = (kept for kept, _, _ in found)
    assert least < 0.2 * all_bytes
    assert least < some < 0.7 * all_bytes
    assert least >= 2 * given.nbytes


def test_a_missing_module_is_an_error():
    with pytest.raises(ConfigError, match=r"no module block\.\*; did you mean"):
        recompute(transformer(), ["block.*"])


@pytest.mark.ranks(2)
@pytest.mark.parametrize(
    ("how", "selective"),
    [("tensor", True), ("shards", True), ("interleaved", True), ("zero_bubble", False)],
)
def test_ranks_train_as_one_process_does(how, selective):
    with started():
        mesh = build_mesh(**{"tensor": {"tp": 2}, "shards": {}}.get(how, {"pp": 2}))
        model = transformer(depth=3)
        if how == "tensor":
            tensor_parallel(model, mesh["tp"], lm.ROLES, sequence=True)
        recompute(model, ["blocks.*"], selective=selective)
        if how == "shards":
            for block in model.blocks:
                fully_shard(block, mesh=mesh["dp"])
            fully_shard(model, mesh=mesh["dp"])
        pipeline = None
        if mesh["pp"].size() > 1:
            options = {"loss": loss_of, "num_microbatches": 4, "schedule": how}
            pipeline = Pipeline(model, mesh["pp"], lm.LAYERS, **options)
            model = pipeline.model
        optimizer, losses = adamw(model.parameters()), []
        for given, following in batches():
            optimizer.zero_grad()
            if pipeline:
                loss = pipeline.step(given, following)
                pipeline.clip_grad_norm_(CLIP)
            else:
                with loss_parallel():
                    loss = loss_of(model(given), following)
                    loss.backward()
                clip_grad_norm_(model.parameters(), CLIP)
            losses.append(getattr(loss, "full_tensor", lambda one=loss: one)().item())
            optimizer.step()
        check(losses, model.named_parameters(), depth=3)


@pytest.mark.ranks(2)
@pytest.mark.parametrize("schedule", ["zero_bubble", "zbv"])
def test_selective_recomputation_with_a_split_backward_is_rejected(schedule):
    with started():
        model = recompute(transformer(), ["blocks.1"], selective=True)
        options = {"loss": loss_of, "num_microbatches": 4, "schedule": schedule}
        with pytest.raises(ConfigError, match=r"got blocks\.1 and the schedule"):
            Pipeline(model, build_mesh(pp=2)["pp"], lm.LAYERS, **options)

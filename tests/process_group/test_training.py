"""torch's data, sharded and tensor parallelism over our backend train as one process does."""

import copy
import warnings

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.algorithms.ddp_comm_hooks import (
    debugging_hooks,
    default_hooks,
    powerSGD_hook,
)
from torch.distributed.algorithms.join import Join
from torch.distributed.algorithms.model_averaging.averagers import PeriodicModelAverager
from torch.distributed.fsdp import CPUOffloadPolicy, MixedPrecisionPolicy, fully_shard
from torch.distributed.optim import PostLocalSGDOptimizer, ZeroRedundancyOptimizer
from torch.distributed.tensor import DTensor, Shard, distribute_tensor
from torch.distributed.tensor.parallel import (
    ColwiseParallel,
    RowwiseParallel,
    SequenceParallel,
    loss_parallel,
    parallelize_module,
)
from torch.nn.functional import cross_entropy, mse_loss
from torch.nn.parallel import DistributedDataParallel as DDP  # noqa: N817 - as all call it

pytestmark = [pytest.mark.ranks(4), pytest.mark.usefixtures("nodes")]

STEPS, BATCH = 3, 8


def mlp(width=12):
    torch.manual_seed(1)
    layers = [nn.Linear(6, width), nn.Tanh(), nn.Linear(width, width), nn.Tanh()]
    return nn.Sequential(*layers, nn.Linear(width, 4)).double()


def batches(steps=STEPS):
    random = torch.Generator().manual_seed(2)
    draw = lambda width: torch.randn(BATCH, width, generator=random, dtype=torch.float64)  # noqa: E731
    return [(draw(6), draw(4)) for _ in range(steps)]


def mine(tensor):
    return tensor.chunk(dist.get_world_size())[dist.get_rank()]


def sgd(model):
    return torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)


def alone(model=None, steps=STEPS, optimizer=sgd, clip=None):
    """Train one process on whole batches; return its parameters."""
    model = model or mlp()
    stepper = optimizer(model)
    for x, y in batches(steps):
        stepper.zero_grad()
        mse_loss(model(x), y).backward()
        if clip:
            nn.utils.clip_grad_norm_(model.parameters(), clip)
        stepper.step()
    return [p.detach() for p in model.parameters()]


def train(model, stepper, steps=STEPS):
    for x, y in batches(steps):
        stepper.zero_grad()
        mse_loss(model(mine(x)), mine(y)).backward()
        stepper.step()


def check(found, expected, rtol=1e-12):
    for one, other in zip(found, expected, strict=True):
        whole = one.full_tensor() if isinstance(one, DTensor) else one
        torch.testing.assert_close(whole.detach(), other, rtol=rtol, atol=rtol)


@pytest.mark.parametrize(
    "options",
    [
        {},
        {"gradient_as_bucket_view": True, "static_graph": True, "bucket_cap_mb": 0.0005},
        {"find_unused_parameters": True},
    ],
)
def test_ddp(options):
    model = DDP(mlp(), **options)
    train(model, sgd(model))
    check(model.parameters(), alone())


def test_ddp_with_parameters_unused_by_some_or_all_ranks():
    class Choosing(nn.Module):
        def __init__(self):
            super().__init__()
            torch.manual_seed(1)
            self.first, self.second, self.third = (nn.Linear(6, 4).double() for _ in range(3))

        def forward(self, x, *, both):
            return self.first(x) + (self.second(x) if both else 0)

    model = Choosing()
    wrapped = DDP(copy.deepcopy(model), find_unused_parameters=True)
    ((x, _),) = batches(1)
    wrapped(mine(x), both=dist.get_rank() == 0).square().mean().backward()
    parts = x.chunk(dist.get_world_size())
    losses = [model(part, both=rank == 0).square().mean() for rank, part in enumerate(parts)]
    (sum(losses) / len(losses)).backward()
    for found, expected in zip(wrapped.parameters(), model.parameters(), strict=True):
        assert (found.grad is None) == (expected.grad is None)
        if found.grad is not None:
            torch.testing.assert_close(found.grad, expected.grad, rtol=1e-12, atol=1e-12)


def test_ddp_accumulates_without_communication():
    model = DDP(mlp())
    stepper = sgd(model)
    for x, y in batches():
        stepper.zero_grad()
        first, second = (slice(None, None, 2), slice(1, None, 2))
        with model.no_sync():
            (mse_loss(model(mine(x)[first]), mine(y)[first]) / 2).backward()
        (mse_loss(model(mine(x)[second]), mine(y)[second]) / 2).backward()
        stepper.step()
    check(model.parameters(), alone())


def test_join_allows_unequal_numbers_of_batches():
    model = DDP(mlp())
    count = 1 + dist.get_rank()
    with Join([model]):
        for x, y in batches(count):
            mse_loss(model(x), y).backward()
    assert all(p.grad is not None for p in model.parameters())
    assert count == 1 + dist.get_rank()


def test_join_may_average_over_the_remaining_ranks():
    model, plain, count = DDP(mlp()), mlp(), 1 + dist.get_rank()
    with Join([model], divide_by_initial_world_size=False):
        for x, y in batches(count):
            model.zero_grad()
            mse_loss(model(x), y).backward()
    if count == dist.get_world_size():  # this rank alone had the last batch
        mse_loss(plain(x), y).backward()
        check([p.grad for p in model.parameters()], [p.grad for p in plain.parameters()])


def test_hooks_of_ddp():
    hooks = ((default_hooks.allreduce_hook, 1e-12), (default_hooks.fp16_compress_hook, 1e-2))
    for hook, rtol in hooks:
        model = DDP(mlp())
        model.register_comm_hook(None, hook)
        train(model, sgd(model))
        check(model.parameters(), alone(), rtol)
    wrapped, model, ((x, y),) = DDP(mlp()), mlp(), batches(1)
    wrapped.register_comm_hook(None, debugging_hooks.noop_hook)
    for one in (wrapped, model):
        mse_loss(one(mine(x)), mine(y)).backward()
    check([p.grad for p in wrapped.parameters()], [p.grad for p in model.parameters()])


def test_power_sgd_of_full_rank_is_exact():
    model = DDP(mlp())
    state = powerSGD_hook.PowerSGDState(
        None, matrix_approximation_rank=12, start_powerSGD_iter=2, min_compression_rate=0.01
    )
    model.register_comm_hook(state, powerSGD_hook.powerSGD_hook)
    train(model, sgd(model), 4)
    check(model.parameters(), alone(steps=4), 1e-10)


def test_zero_redundancy_optimizer():
    model = DDP(mlp())
    train(model, ZeroRedundancyOptimizer(model.parameters(), torch.optim.AdamW, lr=0.01))
    check(
        model.parameters(), alone(optimizer=lambda m: torch.optim.AdamW(m.parameters(), lr=0.01))
    )


def test_post_local_sgd_averages_replicas():
    model, plain = mlp(), lambda one: torch.optim.SGD(one.parameters(), lr=0.1)
    averager = PeriodicModelAverager(period=1, warmup_steps=0)
    train(model, PostLocalSGDOptimizer(plain(model), averager))
    check(model.parameters(), alone(optimizer=plain))


def sharded(model, mesh=None, **options):
    for layer in model:
        if isinstance(layer, nn.Linear):
            fully_shard(layer, mesh=mesh, **options)
    return fully_shard(model, mesh=mesh, **options)


def test_fsdp2_with_clipping():
    model = sharded(mlp())
    model.set_allocate_memory_from_process_group_for_comm(True)
    stepper = sgd(model)
    for x, y in batches():
        stepper.zero_grad()
        mse_loss(model(mine(x)), mine(y)).backward()
        nn.utils.clip_grad_norm_(model.parameters(), 0.1)
        stepper.step()
    check(model.parameters(), alone(clip=0.1))


def test_hsdp():
    size = dist.get_world_size()
    mesh = dist.init_device_mesh("cpu", (size // 2, 2), mesh_dim_names=("replicas", "shards"))
    model = sharded(mlp(), mesh)
    train(model, sgd(model))
    check(model.parameters(), alone())


def test_fsdp2_in_bfloat16():
    policy = MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=torch.float32)
    model = sharded(mlp().float(), mp_policy=policy)
    stepper = sgd(model)
    for x, y in batches():
        stepper.zero_grad()
        mse_loss(model(mine(x).float()), mine(y).bfloat16()).backward()
        stepper.step()
    check(model.parameters(), [p.float() for p in alone()], 3e-2)


def test_tensor_parallel_with_fsdp2():
    size = dist.get_world_size()
    mesh = dist.init_device_mesh("cpu", (size // 2, 2), mesh_dim_names=("data", "tensor"))
    plan = {"0": ColwiseParallel(), "2": RowwiseParallel()}
    model = parallelize_module(mlp(), mesh["tensor"], plan)
    fully_shard(model, mesh=mesh["data"])
    stepper, data = sgd(model), mesh["data"]
    for x, y in batches():
        stepper.zero_grad()
        part = lambda t: t.chunk(data.size())[data.get_local_rank()]  # noqa: E731
        mse_loss(model(part(x)), part(y)).backward()
        stepper.step()
    check(model.parameters(), alone())


def test_sequence_and_loss_parallel():
    mesh = dist.init_device_mesh("cpu", (dist.get_world_size(),))
    torch.manual_seed(3)
    norm = nn.LayerNorm(6).double()
    x = torch.randn(2, 8, 6, dtype=torch.float64)
    expected = norm(x)
    parallelize_module(norm, mesh, SequenceParallel())
    found = norm(distribute_tensor(x, mesh, [Shard(1)]))
    torch.testing.assert_close(found.full_tensor(), expected, rtol=1e-12, atol=1e-12)
    logits = torch.randn(5, 8, dtype=torch.float64, requires_grad=True)
    target = torch.tensor([1, 7, 3, 0, 2])
    cross_entropy(logits, target).backward()
    shards = distribute_tensor(logits.detach(), mesh, [Shard(1)]).requires_grad_()
    with loss_parallel():
        cross_entropy(shards, target).backward()
    torch.testing.assert_close(shards.grad.full_tensor(), logits.grad, rtol=1e-12, atol=1e-12)


def test_compiled_ddp():
    model = DDP(mlp())
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        compiled = torch.compile(model, backend="aot_eager")
        train(compiled, sgd(model))
    check(model.parameters(), alone())


def test_fsdp2_offloads_to_the_cpu():
    model = sharded(mlp(), offload_policy=CPUOffloadPolicy(pin_memory=False))
    train(model, sgd(model))
    check(model.parameters(), alone())

"""Check that gradients summed by NCCL obey the same laws, and that all ranks report failures.

``tests/nccl_stand_in`` replaces NCCL, and ``tests/stand_in`` replaces an accelerator.
"""

import time

import pytest
import torch
from mpi4py import MPI

from hpctrain.comm import bucket_storage
from hpctrain.comm.bucket_storage import NcclBucket
from hpctrain.comm.mpi import MpiCommunicator
from hpctrain.comm.nccl import nccl_communicator
from hpctrain.comm.nccl.nccl_communicator import Offer, nccl_over, why_not
from hpctrain.core.errors import CommError, MismatchError, RankLostError
from tests.gradients import test_programs as programs
from tests.gradients.test_gradients import (  # noqa: F401 - the same laws
    test_averages_in_float16_do_not_overflow_where_the_average_does_not,
    test_gradients_are_averaged_when_backward_returns,
    test_nan_with_a_weight_of_zero_stays_out_of_the_sum,
    test_unequal_batches_are_weighted_by_their_samples,
)
from tests.gradients.training import LAST, MANY, wrapped
from tests.nccl_stand_in import compiled, load
from tests.runtime.victims import run_ranks
from tests.stand_in import Passed, StandIn

pytestmark = pytest.mark.requires("compiler")


@pytest.fixture(autouse=True, scope="module")
def _by_nccl(tmp_path_factory):
    """Treat host tensors as tensors of an accelerator, summed by NCCL."""
    load(MPI.COMM_WORLD, tmp_path_factory.mktemp("nccl"))
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(bucket_storage, "device_of", StandIn)
        patch.setenv("HPCTRAIN_DEVICE_SUMS", "nccl")
        yield


@pytest.fixture(scope="module", params=("thread",))
def overlap(request):
    """Send gradients during backward, as on accelerators."""
    return request.param


@pytest.fixture(scope="module", params=(None,), ids=("one node",))
def per_node(request):
    """Use one node: NCCL determines the nodes itself."""
    return request.param


@pytest.mark.ranks(3)
def test_a_script_trains_as_replicas_of_plain_torch_do(world, worlds):
    worlds.leave()
    programs.test_a_script_trains_as_replicas_of_plain_torch_do(world, 0)


@MANY
def test_nccl_sums_buckets(hvd):
    _, optimizer = wrapped(hvd)
    buckets = optimizer._exchange.reduction.layout.buckets
    assert {type(bucket.storage).__name__ for bucket in buckets} == {"NcclBucket"}


@pytest.mark.ranks(2)
@LAST
def test_unusable_nccl_raises_reason_and_remedy_on_all_ranks(hvd):
    last, whom = hvd.rank() == hvd.size() - 1, f"rank {hvd.size() - 1}: "
    faults = [
        (
            "setattr",
            (StandIn, "card", lambda _: "card 7"),
            "must have its own GPU for NCCL, but ranks",
        ),
        ("setattr", (StandIn, "without_nccl", "it is of wood"), "ranks 0-"),
        ("setenv", ("HPCTRAIN_RECOVER", "1"), "because its sums do not return errors"),
    ]
    of_last = [
        ("setattr", (StandIn, "without_nccl", "it is of wood"), f"{whom}it is of wood"),
        ("setenv", ("NCCL_STAND_IN", "init"), f"{whom}ncclCommInitRankConfig has failed: system"),
    ]
    for how, what, message in faults + of_last:
        with pytest.MonkeyPatch.context() as patch:
            if last or (how, what, message) not in of_last:
                getattr(patch, how)(*what)
            with pytest.raises(CommError) as raised:
                wrapped(hvd)
        assert message in str(raised.value)
        assert str(raised.value).endswith("; set HPCTRAIN_DEVICE_SUMS=auto")
    with pytest.raises(CommError, match="compressed by HalfCodec; set"):
        wrapped(hvd, compression="fp16")


@MANY
def test_ranks_with_different_device_sums_raise(hvd):
    with pytest.MonkeyPatch.context() as patch:
        if hvd.rank() == 0:
            patch.setenv("HPCTRAIN_DEVICE_SUMS", "auto")
        with pytest.raises(MismatchError, match="all ranks or none, got rank 0: auto; rank"):
            wrapped(hvd)


@pytest.mark.parametrize(
    ("version", "may_share", "message"),
    [
        ((22809, 22809), (True, True), "ranks 0-1 share one"),
        ((23007, 23007), (True, False), "ranks 0-1 share one"),
        ((23007, 23007), (True, True), ""),
        ((23007, 22809), (True, True), "the same version on all ranks, got rank 0: 23007; rank 1"),
    ],
)
def test_gpu_is_shared_if_nccl_supports_and_permits_it(version, may_share, message):
    offers = [Offer("", *each, "", "") for each in zip(version, "aa", may_share, strict=True)]
    assert message in why_not(offers)
    assert bool(message) == bool(why_not(offers))


class Queued(Passed):
    """Represent work that no stream has passed yet."""

    def query(self) -> bool:
        return False


def wait():
    """Wait as for a stream that continues when queued work is aborted."""
    for _ in range(1000):
        time.sleep(0.01)


@pytest.fixture
def comm(world):
    """Give each test a communicator, and NCCL over its ranks."""
    made = MpiCommunicator(world.Dup())
    yield made, nccl_over(made, StandIn(torch.device("cpu")))
    made.close()


@MANY
def test_values_of_each_dtype_are_added(world, comm):
    device = StandIn(torch.device("cpu"))
    for dtype in (torch.float16, torch.bfloat16, torch.float32, torch.float64, torch.complex64):
        bucket = NcclBucket(device, comm[1], 70_001, dtype)
        bucket.flat.copy_(torch.arange(70_001) % 7 + world.rank)
        bucket.reduce(world.Barrier, 0.5)
        total = (torch.arange(70_001) % 7) * world.size + sum(range(world.size))
        assert torch.equal(bucket.flat, (total / 2).to(dtype))
    with pytest.raises(CommError, match=r"one of float16, .*, got int32"):
        NcclBucket(device, comm[1], 1, torch.int32)


@pytest.mark.ranks(2, 3)
@pytest.mark.parametrize("is_queued", [True, False], ids=["by its stream", "to queue"])
def test_failed_rank_raises_on_ranks_that_wait_for_its_sum(world, comm, is_queued, monkeypatch):
    monkeypatch.setattr(nccl_communicator, "LOOK_S", 0.1)
    made, values = comm[1], torch.ones(3)
    made.ends_with(Queued() if is_queued or world.rank == 1 else Passed())
    if world.rank == 1:
        monkeypatch.setenv("NCCL_STAND_IN", "later")
        with pytest.raises(RankLostError, match="NCCL has failed: remote process exited"):
            wait()
    else:
        with pytest.raises(RankLostError, match=r"ranks? [\d,-]+ died, or failed, while"):
            wait() if is_queued else made.all_reduce_(values)
    with pytest.raises(RankLostError, match=r"has failed|died, or failed"):
        made.all_reduce_(values)


@pytest.mark.ranks(2, 3)
def test_memory_of_a_sum_is_kept_when_its_caller_is_interrupted(world, comm, monkeypatch):
    def interrupted(_):
        raise KeyboardInterrupt

    if world.rank == 0:
        with monkeypatch.context() as patch:
            patch.setattr(comm[1], "_settle", interrupted)
            with pytest.raises(KeyboardInterrupt):
                comm[1].all_reduce_(torch.ones(1000))
        others = [torch.full((1000,), 7.0) for _ in range(100)]
    world.Barrier()
    if world.rank > 0:
        comm[1].all_reduce_(torch.ones(1000))
    world.Barrier()
    if world.rank == 0:
        comm[1]._settle("to add")
        assert all((other == 7).all() for other in others)
    comm[1].ends_with(Passed())


BODY = """
import ctypes
from torch import nn
from hpctrain.comm import bucket_storage
from hpctrain.comm.bucket_storage import NcclBucket
from tests.stand_in import StandIn

ctypes.CDLL({library!r})
bucket_storage.device_of = StandIn
os.environ["HPCTRAIN_DEVICE_SUMS"] = "nccl"
model = nn.Sequential(nn.Linear(300, 500), nn.Tanh(), nn.Linear(500, 300))
optimizer = hvd.DistributedOptimizer(torch.optim.SGD(model.parameters()), model.named_parameters())
hvd.broadcast_parameters(model.state_dict())
steps, queue = [], NcclBucket._sum

def fail(*given):
    if steps[-1] == 3 and rank == 1:
        now()
        {failure}
    return queue(*given)

NcclBucket._sum = fail
for step in range(20):
    steps.append(step)
    optimizer.zero_grad()
    model(torch.randn(4, 300)).square().mean().backward()
    optimizer.step()
"""


@pytest.mark.launches
@pytest.mark.parametrize(
    ("failure", "message"),
    [
        ("os.kill(os.getpid(), signal.SIGKILL)", "rank 1"),
        ("os.environ['NCCL_STAND_IN'] = 'sum'", "remote process exited"),
    ],
)
def test_failure_of_a_rank_in_an_nccl_sum_ends_the_job(tmp_path, failure, message):
    library = str(compiled(tmp_path))
    ended = run_ranks(tmp_path, BODY.format(library=library, failure=failure), num_ranks=3)
    assert ended.code != 0
    assert ended.seconds < 30
    assert not ended.left_over
    assert message in ended.err + "".join(ended.logs.values())

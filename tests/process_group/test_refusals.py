"""Invalid calls raise an error with the reason on all ranks, without deadlocks."""

import os
import signal
from datetime import timedelta

import pytest
import torch
import torch.distributed as dist

from hpctrain.comm.process_group.group import HpctrainGroup
from hpctrain.comm.process_group.ordered import OLDER_NAMES
from hpctrain.core.errors import CommError, RankLostError
from tests.process_group.conftest import NODES, all_gather_single, reduce_scatter_single, started

pytestmark = pytest.mark.ranks(2, 3)

SOON = timedelta(seconds=1.5)
AVG = dist.ReduceOp.AVG
ONE = torch.ones(1)


def lists(*numels):
    return [torch.ones(numel) for numel in numels]


def misfits(size, is_wrong, *, by_root):
    """Yield calls, whose arguments are wrong on ranks with ``is_wrong``, and the expected errors.

    With ``by_root``, the function also yields calls whose list on the root is wrong.
    """
    more = [3] * is_wrong
    every, longer = [3] * size, 3 * size + is_wrong
    yield (
        "all_gather must have a list",
        lambda: dist.all_gather(lists(*every), *lists(3 + is_wrong)),
    )
    yield "all_gather must have a list", lambda: dist.all_gather(lists(*every, *more), *lists(3))
    yield "all_gather_single must have", lambda: all_gather_single(*lists(longer, 3))
    yield "reduce_scatter_single must have", lambda: reduce_scatter_single(*lists(3, longer))
    yield (
        "reduce_scatter must have a list",
        lambda: dist.reduce_scatter(*lists(3), lists(*every, *more)),
    )
    for given in ([*every[1:], 4], [*every, 3]) if by_root else ():
        of_root = lists(*given) if is_wrong else None
        yield "scatter must have a list", lambda whole=of_root: dist.scatter(*lists(3), whole)
        yield "gather must have a list", lambda whole=of_root: dist.gather(*lists(3), whole)


@pytest.mark.parametrize("wrong", ["first", "all"])
@pytest.mark.parametrize("per_node", NODES)
def test_tensors_of_a_wrong_size_on_one_rank_are_an_error_on_all(per_node, wrong):
    with started(per_node):
        is_wrong = wrong == "all" or dist.get_rank() == 0
        for text, call in misfits(dist.get_world_size(), is_wrong, by_root=wrong == "first"):
            with pytest.raises((CommError, ValueError), match=text):
                call()
        dist.barrier()


@pytest.mark.parametrize("per_node", NODES)
def test_a_reduction_to_different_roots_is_an_error(per_node):
    with started(per_node), pytest.raises(CommError, match=r"reduce on 0.*reduce on 1"):
        dist.reduce(torch.ones(3), dst=min(dist.get_rank(), 1))


@pytest.mark.usefixtures("ours")
def test_quantized_tensors_and_negative_tags_are_rejected():
    values = torch.quantize_per_tensor(torch.ones(3), 0.1, 0, torch.quint8)
    with pytest.raises(CommError, match="must not be quantized"):
        dist.broadcast(values, 0)
    with pytest.raises(ValueError, match="tag must be from 0"):
        dist.isend(torch.ones(3), (dist.get_rank() + 1) % dist.get_world_size(), tag=-1)


def test_functions_left_to_other_backends_exist_on_process_groups():
    kept = vars(HpctrainGroup).values()
    left = {f.__name__ for f in kept if hasattr(f, "__wrapped__") and f.__code__.co_name == "call"}
    assert {"allreduce", "all_gather_single_coalesced"} <= left
    names = [name if hasattr(dist.ProcessGroup, name) else OLDER_NAMES[name] for name in left]
    assert not [name for name in names if not hasattr(dist.ProcessGroup, name)]


@pytest.mark.usefixtures("ours")
@pytest.mark.requires("no-accelerator")
def test_next_to_nccl_cpu_tensors_use_our_backend():
    dist.destroy_process_group()
    dist.init_process_group("cpu:hpctrain,cuda:nccl")
    out = torch.ones(3)
    dist.all_reduce(out)
    assert out[0] == dist.get_world_size()
    with pytest.raises(CommError, match=r"on CUDA if torch has NCCL, got one on meta"):
        dist.all_reduce(torch.ones(3, device="meta"))


@pytest.mark.usefixtures("ours")
def test_a_forked_child_cannot_communicate_while_an_operation_is_in_flight():
    with torch.no_grad():
        work = dist.all_reduce(torch.ones(10), async_op=True)
    child = os.fork()
    if child == 0:
        signal.alarm(10)
        try:
            dist.all_reduce(torch.ones(3))
        except CommError:
            os._exit(5)
        os._exit(6)
    assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 5
    work.wait()
    out = torch.ones(3)
    dist.all_reduce(out)
    assert out[0] == dist.get_world_size()


def test_a_group_with_missing_members_is_an_error_on_the_others():
    with started():
        size = dist.get_world_size()
        last = dist.get_rank() == size - 1
        if not last:
            for _ in range(2):  # a failed attempt must not affect the next one
                with pytest.raises(RankLostError, match=r"was not created on rank.*timeout=1.5"):
                    dist.new_group(range(size), timeout=SOON)
        dist.barrier()


@pytest.mark.parametrize("per_node", NODES)
@pytest.mark.parametrize(
    ("call", "reason"),
    [
        (lambda: dist.all_reduce(torch.ones(3) > 0, AVG), "average must be of numbers, got bool"),
        (lambda: dist.broadcast(ONE.expand(3), 0), r"share memory.*\(3,\) from expand"),
        (lambda: dist.reduce_scatter_tensor(ONE.expand(2), torch.ones(6)), "share memory"),
        (lambda: dist.all_gather_into_tensor(torch.ones(8), torch.ones(3)), "all_gather.* 8 and"),
    ],
    ids=["bool", "expanded", "expanded part", "size"],
)
def test_a_rejected_call_is_named_and_the_group_remains_usable(per_node, call, reason):
    with started(per_node):
        with pytest.raises(RuntimeError, match=rf"(?s)number 1 of group 0 of ranks.*{reason}"):
            call()
        last = torch.ones(3)
        dist.all_reduce(last)
        assert last.tolist() == [dist.get_world_size()] * 3

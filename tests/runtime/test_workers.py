"""Processes that a rank starts can neither join the world nor communicate."""

import os

import pytest
import torch

import hpctrain
from hpctrain.core.errors import CommError
from tests.runtime.victims import run_ranks

SPAWNING = """
    from torch.utils.data import DataLoader
    loader = DataLoader([1.0, 2.0], num_workers=1, multiprocessing_context="{method}")
    if __name__ == "__main__":
        for batch in loader:
            hvd.allreduce(batch)
"""


@pytest.mark.launches
@pytest.mark.parametrize(
    "method", ["forkserver", pytest.param("spawn", marks=pytest.mark.conformance)]
)
def test_a_worker_that_executes_init_on_import_is_rejected(method, tmp_path):
    outcome = run_ranks(tmp_path, SPAWNING.format(method=method))
    assert outcome.code != 0
    assert "was started by a rank through multiprocessing" in outcome.err
    assert 'guard init() and all code that trains by `if __name__ == "__main__":`' in outcome.err


COLLECTIVES = {
    "named": lambda: hpctrain.allreduce(torch.ones(2)),
    "without an answer": lambda: hpctrain.allreduce_async(torch.ones(2)),
    "barrier": hpctrain.barrier,
    "join": hpctrain.join,
    "object": lambda: hpctrain.broadcast_object(1),
}


class Asking(torch.utils.data.Dataset):
    """A dataset whose samples are results of collectives; forked workers may not call them."""

    def __init__(self, optimizer):
        self.optimizer, self.weight = optimizer, optimizer.param_groups[0]["params"][0]

    def __len__(self):
        return len(COLLECTIVES) + 1

    def __getitem__(self, index):
        calls = [*COLLECTIVES.values(), self._backward]
        try:
            calls[index]()
        except CommError as error:
            return f"{hpctrain.rank()}: {error}"
        return "taken"

    def _backward(self):
        (self.weight.sum()).backward()


@pytest.mark.ranks(2, 3)
@pytest.mark.parametrize("overlap", ["thread", "end"])
def test_collectives_in_a_forked_worker_are_rejected_and_the_parent_continues(
    world, overlap, monkeypatch
):
    monkeypatch.setenv("HPCTRAIN_OVERLAP", overlap)
    hpctrain.init()
    weight = torch.nn.Parameter(torch.ones(3))
    optimizer = hpctrain.DistributedOptimizer(torch.optim.SGD([weight], lr=0.1))
    loader = torch.utils.data.DataLoader(
        Asking(optimizer), num_workers=1, batch_size=None, multiprocessing_context="fork"
    )
    for message in loader:
        assert message.startswith(f"{world.rank}: only process {os.getpid()}, which has called"), (
            message
        )
    mean = hpctrain.allreduce(torch.full((2,), float(world.rank)))
    assert mean.tolist() == [(world.size - 1) / 2] * 2
    (weight.sum() * world.rank).backward()
    assert weight.grad.tolist() == [(world.size - 1) / 2] * 3
    hpctrain.shutdown()


def is_refused_in_child(call):
    child = os.fork()
    if not child:
        code = 1
        try:
            call()
        except CommError as error:
            code = 0 if "a forked child" in str(error) else 2
        finally:
            os._exit(code)
    return os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 0


@pytest.mark.ranks(2, 3)
def test_a_forked_child_can_neither_join_nor_train_nor_send(world):
    hpctrain.init()
    model = torch.nn.Linear(3, 1)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    table = hpctrain.ShardedEmbedding(9, 2)
    group = hpctrain.current().comm.group(range(world.size))

    def step():
        optimizer.zero_grad()
        model(torch.ones(2, 3)).mean().backward()
        optimizer.step()

    calls = [hpctrain.init, step, lambda: table(torch.tensor([1]))]
    calls.append(lambda: group.send(torch.ones(2), (world.rank + 1) % world.size))
    for make in (hpctrain.AsyncSGD, hpctrain.Hogwild):
        with make(model, optimizer) as method:
            step()
            asking = [method.settle] if make is hpctrain.AsyncSGD else []
            world.barrier()  # no rank changes the shared parameters of Hogwild below
            before = model.weight.clone()
            assert all(is_refused_in_child(call) for call in (*calls, *asking))
            assert model.weight.equal(before)
            world.barrier()
            step()
    group.close()
    hpctrain.shutdown()

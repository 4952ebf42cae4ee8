"""Checkpoints of local methods: identical replicas are shared state, others private state."""

import pytest

from hpctrain.checkpoint import load, save
from hpctrain.core.errors import CheckpointError
from tests.checkpoint.states import same
from tests.local_sgd.local_methods import METHODS, Normed, Run, num_kinds, state_of


@pytest.mark.ranks(2, 3)
@pytest.mark.parametrize("method", METHODS)
def test_a_checkpoint_within_a_round_does_not_mix_replicas(hvd, world, method, tmp_path):
    folder, comm = world.bcast(tmp_path), hvd.current().comm
    run = Run(hvd, method, model=Normed()).to(3)
    state = {"model": run.model.state_dict(), "optimizer": run.optimizer.state_dict()}
    if num_kinds(world, run.replica) == 1:
        save(folder / "a", state, comm, step=3)
        assert same(load(folder / "a", comm).state, state)
    else:
        with pytest.raises(CheckpointError, match=r"tensors that ranks share.* differ: "):
            save(folder / "a", state, comm, step=3)
    # The pattern of the guide: a shared state, and a private state of each rank.
    own = state_of(run.model, run.optimizer, run.method)
    shared = {"method": run.method.shared_state()}
    with run.method.averaged():
        shared["parameters"] = dict(run.model.named_parameters())
        save(folder / "b", shared, comm, step=3, private=own)
        expected = comm.broadcast_object(shared)
    loaded = load(folder / "b", comm)
    assert same(loaded.state, expected)
    assert same(loaded.private[hvd.rank()], dict(own))
    run.end(9)

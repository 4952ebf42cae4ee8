"""A change on one rank of a divided model after the last step is an error on all at shutdown."""

import gc
import re

import pytest
import torch
import torch.distributed as dist

import hpctrain
from hpctrain.core.errors import ReplicaError
from tests.parallel.test_guard import Program, batches, trained


def end_of(world, layout, change, *, who, is_deleted=False):
    """Take two steps, change something on one rank, shut down; return the message of the error."""
    hpctrain.init()
    dist.init_process_group("hpctrain")
    program = Program(layout)
    for batch in list(batches())[:2]:
        program.step(*batch, "")
    if who in (None, world.rank):
        change(program)
    if is_deleted:
        del program
        gc.collect()
    dist.destroy_process_group()
    message = ""
    try:
        hpctrain.shutdown()
    except ReplicaError as error:
        message = str(error)
    assert len(set(world.allgather(message))) == 1
    return message


def changes_the_rate(program):
    program.optimizer.param_groups[0]["lr"] = 0.05


def writes(program):
    program.parameter().data.mul_(0.5)


@torch.no_grad()
def writes_as_torch_counts(program):
    program.parameter().mul_(0.5)


def changes_the_state(program):
    program.optimizer.state[program.parameter()]["momentum_buffer"].mul_(2)


def steps_once_more(program):
    program.optimizer.step()


TOLD = {
    changes_the_rate: r"lr of group 0 of optimizer 0 \(rank",
    writes: r"[013]\.\S*weight \(rank",
    writes_as_torch_counts: r"[013]\.\S*weight \(rank",
    steps_once_more: r"steps since the last batch \(rank",
    changes_the_state: r"momentum_buffer of 1\.norm\.weight \(rank",
}
CASES = [
    *(("tp", change) for change in TOLD if change is not steps_once_more),
    ("pp untied", steps_once_more),
    *(("zero1", changes_the_rate), ("zero3", changes_the_rate)),
    *(("pp", change) for change in (changes_the_rate, writes, writes_as_torch_counts)),
]
OF_FOUR = [
    *(("tp fsdp", change) for change in (writes, changes_the_state)),
    ("zero3 replicas", changes_the_rate),
    *(("pp tp", change) for change in (changes_the_rate, writes)),
    *(("pp ddp", change) for change in (changes_the_rate, writes)),
]


def require_an_error(world, layout, change, who, **options):
    message = end_of(world, layout, change, who=who, **options)
    assert message.startswith("all ranks must be equal after the last step, but differ: ")
    assert re.match(TOLD[change], message.partition(": ")[2]), message
    assert f"rank {who}: " in message, message


@pytest.mark.ranks(2)
@pytest.mark.parametrize(("layout", "change"), CASES)
def test_a_change_after_the_last_step_on_one_of_two_ranks_is_an_error_on_all(
    world, layout, change
):
    require_an_error(world, layout, change, who=1)


@pytest.mark.ranks(4)
@pytest.mark.parametrize(("layout", "change"), OF_FOUR)
def test_a_change_after_the_last_step_on_one_of_four_ranks_is_an_error_on_all(
    world, layout, change
):
    require_an_error(world, layout, change, who=2)


@pytest.mark.ranks(2)
@pytest.mark.parametrize("layout", ["tp", "pp"])
def test_a_deleted_model_is_compared(world, layout):
    require_an_error(world, layout, writes, who=1, is_deleted=True)


@pytest.mark.ranks(2)
@pytest.mark.parametrize(("layout", "change"), CASES[::2])
def test_a_change_on_all_ranks_after_the_last_step_is_no_error(world, layout, change):
    assert not end_of(world, layout, change, who=None)


@pytest.mark.ranks(2)
@pytest.mark.parametrize("setting", ["warn", "off"])
def test_with_check_weights_warn_a_difference_is_a_warning(world, monkeypatch, caplog, setting):
    monkeypatch.setenv("HPCTRAIN_CHECK_WEIGHTS", setting)
    hpctrain.init()
    dist.init_process_group("hpctrain")
    with caplog.at_level("WARNING", logger="hpctrain"):
        program = trained(Program("tp"), "write", is_actor=world.rank == 1)
        dist.destroy_process_group()
        hpctrain.shutdown()
    is_reported = setting == "warn" and world.rank == 0
    assert ("the same values of replicated parameters" in caplog.text) == is_reported
    assert ("all ranks must be equal after the last step" in caplog.text) == is_reported
    del program

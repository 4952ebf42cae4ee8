"""Messages arrive whole, are counted, and are waited for asleep."""

import time

import pytest
import torch

from hpctrain.comm.rail.mpi_wire import MpiWire
from hpctrain.comm.waiting import Watch
from hpctrain.core.errors import CommError, RankLostError


@pytest.mark.ranks(2, 3, 4)
def test_an_exchange_round_the_ranks_moves_each_message_one_on(world):
    wire = MpiWire(world)
    outgoing, incoming = torch.full((1000,), float(wire.rank)), torch.empty(1000)
    wire.exchange(outgoing, (wire.rank + 1) % wire.size, incoming, (wire.rank - 1) % wire.size)
    assert bool((incoming == (wire.rank - 1) % wire.size).all())
    assert wire.num_bytes_sent == 4000


@pytest.mark.ranks(2)
def test_a_message_larger_than_any_socket_buffer_needs_no_order(world):
    wire = MpiWire(world)
    outgoing, incoming = torch.full((1 << 24,), wire.rank + 1.0), torch.empty(1 << 24)
    wire.exchange(outgoing, 1 - wire.rank, incoming, 1 - wire.rank)
    assert bool((incoming == 2.0 - wire.rank).all())


@pytest.mark.ranks(2)
def test_a_late_partner_is_waited_for_asleep(world):
    watch = Watch()
    wire = MpiWire(world, watch=watch)
    world.Barrier()
    used_s = time.process_time()
    if wire.rank == 0:
        time.sleep(2)
        wire.send(torch.ones(10), 1)
    else:
        wire.receive_(torch.empty(10), 0)
        assert watch.waited_s > 1.5
        assert time.process_time() - used_s < 0.2 * watch.waited_s


@pytest.mark.ranks(2)
def test_the_world_s_number_of_a_partner_is_in_the_message(world):
    watch = Watch(hosts={4: "n4", 7: "n7"}, rank=4 + 3 * world.rank, timeout_s=0.3)
    wire = MpiWire(world, watch=watch, world_ranks=[4, 7], name="rail 0")
    incoming = torch.zeros(1)
    if wire.rank == 0:
        transfer = wire.start_receive(incoming, 1)
        with pytest.raises(RankLostError, match=r"rank 4 on n4 .* for rank 7 on n7 over rail 0"):
            wire.finish(transfer)
    world.Barrier()
    if wire.rank == 1:
        wire.send(torch.ones(1), 0)
    else:
        wire.finish(transfer)
        assert incoming.item() == 1


@pytest.mark.ranks(2)
@pytest.mark.parametrize(("numel", "sends"), [(5, "20 B"), (50, "more")])
def test_a_message_of_another_size_is_an_error_that_names_both_ends(world, numel, sends):
    wire = MpiWire(world)
    if wire.rank == 0:
        with pytest.raises(CommError, match=f"rank 0 takes 40 B and rank 1 sends {sends}"):
            wire.receive_(torch.empty(10), 1)
    else:
        wire.send(torch.ones(numel), 0)

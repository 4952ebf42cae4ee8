"""Controllers and requests for the tests of this folder."""

import pytest

from hpctrain.core.config import Settings
from hpctrain.negotiation.controller import Controller
from hpctrain.negotiation.request import Kind, Request, Sum
from hpctrain.negotiation.stall import LastCall, SetMember, StallWatch
from hpctrain.negotiation.timeline import Timelines

SIZES = pytest.mark.ranks(1, 2, 3, 4)
SEVERAL = pytest.mark.ranks(2, 3, 4)


def controller_of(comm, **options):
    members = [SetMember(rank, "here") for rank in range(comm.size)]
    stalls = StallWatch(Settings(), comm.rank, members, LastCall())
    timelines = Timelines(comm.rank, comm.size)
    return Controller(comm, timelines=timelines, stalls=stalls, **options)


def allreduce(name, tensor, op=Sum):
    return Request(Kind.ALLREDUCE, name, [tensor], in_place=True, op=op)


def run(controller, name, tensor, op=Sum):
    """Sum a tensor in place by a request."""
    return controller.run(allreduce(name, tensor, op))[0]


def run_now(controller, name, tensor, op=Sum):
    """Sum a tensor in place as ``hvd.allreduce_`` does: by one call of the kernel if possible."""
    if controller.reduce_now(name, tensor, op, 1.0, 1.0):
        return tensor
    request = allreduce(name, tensor, op)
    controller.repeat(name, request)
    return controller.run(request)[0]


RUNS = pytest.mark.parametrize("run", [run, run_now])


def broadcast(tensor):
    return Request(Kind.BROADCAST, None, [tensor], in_place=True, root=0)


def joined(controller):
    """Join; return the rank that joined last."""
    return controller.start_join().wait()[0]

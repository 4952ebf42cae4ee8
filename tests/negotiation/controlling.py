"""What tests ask controllers for."""

import pytest

from hpctrain.negotiation.request import Kind, Request, Sum

SIZES = pytest.mark.ranks(1, 2, 3, 4)
SEVERAL = pytest.mark.ranks(2, 3, 4)


def allreduce(name, tensor, op=Sum):
    return Request(Kind.ALLREDUCE, name, [tensor], in_place=True, op=op)


def broadcast(tensor):
    return Request(Kind.BROADCAST, None, [tensor], in_place=True, root=0)


def joined(controller):
    """Join, and return who came last."""
    return controller.start_join().wait()[0]

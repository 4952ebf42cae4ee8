"""Facts about a tensor that is reduced in place again under one name: checked once."""

import torch
from torch import Tensor

from hpctrain.negotiation.reduce_op import ReduceOp
from hpctrain.negotiation.request import Request, Signature

_STRIDED = torch.strided


class Recurring:
    """An all-reduce in place of one dense tensor on the CPU that may come again."""

    __slots__ = ("_dtype", "_op", "_postscale", "_prescale", "_shape", "name", "signature")

    def __init__(self, name: str, signature: Signature) -> None:
        """Take what was checked when it came for the first time.

        Args:
            name: by which the ranks find each other's requests; empty for the next number.
            signature: of one tensor.
        """
        self.name, self.signature = name, signature
        (self._dtype,), (self._shape,) = signature.dtypes, signature.shapes
        self._op, self._prescale = signature.op, signature.prescale
        self._postscale = signature.postscale

    def fits(self, tensor: Tensor, op: ReduceOp, prescale: float, postscale: float) -> bool:
        """Say whether this is what is asked for with ``tensor``."""
        return (
            op is self._op
            and isinstance(tensor, Tensor)  # type: ignore[redundant-expr]
            and tensor.dtype is self._dtype
            and tensor.shape == self._shape
            and prescale == self._prescale
            and postscale == self._postscale
            and tensor.is_cpu
            and tensor.layout is _STRIDED
        )

    def request(self, tensor: Tensor) -> Request:
        """Return the request, with ``tensor``."""
        kind, _, _, op, prescale, postscale, _, _ = self.signature
        return Request(
            kind,
            self.name or None,
            (tensor,),
            in_place=True,
            op=op,
            prescale=prescale,
            postscale=postscale,
        )

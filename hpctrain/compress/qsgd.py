"""QSGD, which rounds values randomly, without bias, to levels relative to a block norm."""

import zlib
from typing import Annotated

import numpy as np
import torch
from torch import Tensor

from hpctrain.comm.communicator import Internode
from hpctrain.comm.norms import row_norms
from hpctrain.compress.elias import LARGEST, Reader, codes_of, packed
from hpctrain.compress.rail_codec import CodedShare, RailCodec, exchanged
from hpctrain.core.checks import Bounds, checked

_CHUNK = 1 << 18  # values per pass, which fit into the CPU cache


class QSGD(RailCodec):
    """Codec that sends randomly rounded values in Elias' omega code.

    The rounding is unbiased. Codes cannot be added, so each rank sends its codes to all other
    ranks, which decode them. The number of bytes grows with the number of nodes, and differs
    between steps.

    Args:
        levels: number of steps between zero and the norm of a block. The square root of ``block``
            gives about 2.8 bits per value; 1 gives the fewest bits.
        block: values that share a norm.
        seed: seed of the random numbers, which differ by rank, bucket and step.

    Source: Alistarh et al. 2017, "QSGD: communication-efficient SGD via gradient quantization
    and encoding", with the 2-norm.
    """

    def __init__(self, levels: int = 16, block: int = 512, seed: int = 0) -> None:
        super().__init__()
        for name, number in (("levels", levels), ("block", block)):
            checked(name, number, Annotated[int, Bounds(least=1, most=LARGEST)])
        self._levels, self._block, self._seed = levels, block, seed

    def bytes_of(self, share: CodedShare) -> int:
        """Return an estimate of 3 bits per value; the true size depends on the values."""
        return share.numel * 3 // 8

    def reduce_(self, share: CodedShare, values: Tensor, link: Internode) -> None:
        """Exchange the codes with all ranks, and sum the decoded values; see ``RailCodec``."""
        name = f"{self._seed} {link.rank} {share.bucket} {share.places[0].start} {share.num_steps}"
        generator = torch.Generator().manual_seed(zlib.crc32(name.encode()))
        parts = values.split(max(_CHUNK // self._block, 1) * self._block)
        packets = [self._packed(*self.quantized(part, generator)) for part in parts]
        sizes = torch.tensor([len(packet) for packet in packets])
        of_all = exchanged(link, [sizes] * link.size, [len(sizes)] * link.size)
        numels = [int(each.sum()) for each in of_all]
        arrived = exchanged(link, [torch.cat(packets)] * link.size, numels)
        values.zero_()
        for whole, each in zip(arrived, of_all, strict=True):
            for part, packet in zip(parts, whole.split(each.tolist()), strict=True):
                part.add_(self._unpacked(packet, part))

    def quantized(self, values: Tensor, generator: torch.Generator) -> tuple[Tensor, Tensor]:
        """Return the norm of each block, and the signed levels of its values as int32."""
        blocks = _blocks_of(values, self._block)
        norms = row_norms(blocks)
        # A norm may exceed the range of its dtype; with any upper bound the rounding is unbiased.
        largest = torch.finfo(blocks.dtype).max
        norms = torch.where(norms.isinf(), norms, norms.clamp(max=largest)).to(blocks.dtype)
        exact = (blocks.abs() / norms.where(norms > 0, 1.0)[:, None]).mul_(self._levels)
        exact.clamp_(max=self._levels)  # the norm is rounded, so a value may exceed it
        below = exact.floor()
        drawn = torch.rand(exact.shape, generator=generator, dtype=exact.dtype)
        levels = below + (drawn < exact - below)
        return norms, torch.copysign(levels, blocks).nan_to_num_(0.0).to(torch.int32)

    def restored(self, norms: Tensor, levels: Tensor) -> Tensor:
        """Return the values of quantized ``levels``, with one block per row."""
        return (levels.to(norms.dtype) / self._levels) * norms[:, None]

    def num_code_bits(self, levels: Tensor) -> int:
        """Return the number of bits of the codes of ``levels``, without norms and lengths."""
        return int(self._codes(levels)[1].sum())

    def _codes(self, levels: Tensor) -> "tuple[np.ndarray, np.ndarray, np.ndarray]":
        """Return codes of gaps and signed levels, and the length and block index of each code."""
        flat, length = levels.numpy().ravel(), levels.shape[1]
        at = np.flatnonzero(flat)
        found, block = flat[at].astype(np.int64), at // length
        gaps = np.diff(at, prepend=-1)
        is_first = np.diff(block, prepend=-1) != 0
        gaps[is_first] = at[is_first] % length + 1
        codes, lengths = np.empty((2, len(at), 2), np.int64)
        codes[:, 0], lengths[:, 0] = codes_of(gaps)
        level, bits = codes_of(np.abs(found))
        codes[:, 1], lengths[:, 1] = (found < 0).astype(np.int64) << bits | level, bits + 1
        return codes.ravel(), lengths.ravel(), np.repeat(block, 2)

    def _packed(self, norms: Tensor, levels: Tensor) -> Tensor:
        """Return a packet: norms, nonzero counts and bit counts of all blocks, then the codes."""
        codes, lengths, block = self._codes(levels)
        num_bits = np.bincount(block, lengths, minlength=len(levels)).astype(np.int32)
        numbers = np.bincount(block[::2], minlength=len(levels)).astype(np.int32)
        parts = [norms.numpy(), numbers, num_bits, packed(codes, lengths)]
        return torch.from_numpy(np.concatenate([part.view(np.uint8) for part in parts]))

    def _unpacked(self, packet: Tensor, like: Tensor) -> Tensor:
        """Decode a packet; return flat values with the size and dtype of ``like``."""
        num_blocks, raw = -(-like.numel() // self._block), packet.numpy()
        first = num_blocks * like.itemsize
        norms = torch.from_numpy(raw[:first].copy()).view(like.dtype)
        numbers, num_bits = raw[first : first + 8 * num_blocks].view(np.int32).reshape(2, -1)
        starts = np.cumsum(num_bits, dtype=np.int64) - num_bits
        order = np.argsort(-numbers, kind="stable")  # so that unfinished blocks stay in front
        reader = Reader(raw[first + 8 * num_blocks :], starts[order])
        num_left = num_blocks - np.cumsum(np.bincount(numbers, minlength=1))
        levels = np.zeros(num_blocks * self._block, np.int32)
        places = order * self._block - 1
        for going in num_left[:-1].tolist():
            gaps, found = reader.read(going)
            places[:going] += gaps
            levels[places[:going]] = found
        blocks = torch.from_numpy(levels).view(num_blocks, self._block)
        return self.restored(norms, blocks).view(-1)[: like.numel()]


def _blocks_of(values: Tensor, block: int) -> Tensor:
    """Return values with one block per row; the last row is padded with zeros."""
    missing = -values.numel() % block
    if missing:
        values = torch.cat([values, values.new_zeros(missing)])
    return values.view(-1, block)

"""QSGD: each value is rounded at random to a level of its block's norm, so that none is biased."""

import zlib

import numpy as np
import torch
from torch import Tensor

from hpctrain.compress.elias import Reader, bits_of, codes_of
from hpctrain.compress.rail_codec import CodedShare, Link, RailCodec, exchanged
from hpctrain.core.errors import ConfigError


class QSGD(RailCodec):
    """Sends levels of values in Elias' code; all ranks decode those of all.

    The expectation of what arrives is what was sent. Codes cannot be added, so they go to all:
    bytes grow with the number of nodes, and their number differs from step to step.

    Args:
        levels: steps between zero and the norm of a block; the root of ``block`` makes about 2.8
            bits of a value, 1 the fewest.
        block: values that share a norm.
        seed: of the random numbers, which each rank and step has its own of.

    Source: Alistarh et al. 2017, "QSGD: communication-efficient SGD via gradient quantization
    and encoding", with its norm of two.
    """

    def __init__(self, levels: int = 16, block: int = 512, seed: int = 0) -> None:
        super().__init__()
        if levels < 1 or block < 1:
            raise ConfigError(f"levels and block must be at least 1, got {levels} and {block}")
        self._levels, self._block, self._seed = levels, block, seed

    def bytes_of(self, share: CodedShare) -> int:
        """Return those of 3 bits per value, about; how many there are is known when they are."""
        return share.numel * 3 // 8

    def reduce_(self, share: CodedShare, values: Tensor, link: Link) -> None:
        """Send codes to all; see ``RailCodec``."""
        name = f"{self._seed} {link.rank} {share.places[0].number} {share.num_steps}"
        generator = torch.Generator().manual_seed(zlib.crc32(name.encode()))
        norms, levels = self.quantized(values, generator)
        packet = self._packed(norms, levels)
        size = torch.tensor([len(packet)])
        sizes = [int(each) for each in exchanged(link, [size] * link.size, [1] * link.size)]
        arrived = exchanged(link, [packet] * link.size, sizes)
        values.zero_()
        for other in arrived:
            values.add_(self._unpacked(other, values))

    def quantized(self, values: Tensor, generator: torch.Generator) -> tuple[Tensor, Tensor]:
        """Return the norm of each block, and signed levels of its values as int32."""
        blocks = _blocks_of(values, self._block)
        norms = torch.linalg.vector_norm(blocks, dim=1)
        exact = blocks.abs() * (self._levels / norms.where(norms > 0, 1.0))[:, None]
        below = exact.floor()
        drawn = torch.rand(exact.shape, generator=generator, dtype=exact.dtype)
        levels = below + (drawn < exact - below)
        return norms, torch.copysign(levels, blocks).nan_to_num_(0.0).to(torch.int32)

    def restored(self, norms: Tensor, levels: Tensor) -> Tensor:
        """Return the values that levels stand for, in rows of a block each."""
        return levels.to(norms.dtype) * (norms / self._levels)[:, None]

    def num_code_bits(self, levels: Tensor) -> int:
        """Return how many bits the codes of levels have, without norms and lengths."""
        return int(self._codes(levels)[1].sum())

    def _codes(self, levels: Tensor) -> "tuple[np.ndarray, np.ndarray, np.ndarray]":
        """Return codes with their lengths, and the block of each."""
        block, place = levels.numpy().nonzero()
        found = levels.numpy()[block, place].astype(np.int64)
        is_first = np.diff(block, prepend=-1) != 0
        gaps = np.where(is_first, place + 1, np.diff(place, prepend=0))
        gap_codes, gap_bits = codes_of(gaps)
        level_codes, level_bits = codes_of(np.abs(found))
        codes = np.stack([gap_codes, (found < 0).astype(np.int64), level_codes], axis=1)
        lengths = np.stack([gap_bits, np.ones_like(gap_bits), level_bits], axis=1)
        return codes.ravel(), lengths.ravel(), np.repeat(block, 3)

    def _packed(self, norms: Tensor, levels: Tensor) -> Tensor:
        """Return norms, how many values of each block are not zero, bits of each, and all bits."""
        codes, lengths, block = self._codes(levels)
        num_bits = np.bincount(block, lengths, minlength=len(levels)).astype(np.int32)
        numbers = np.bincount(block[::3], minlength=len(levels)).astype(np.int32)
        parts = [norms.numpy(), numbers, num_bits, np.packbits(bits_of(codes, lengths))]
        return torch.from_numpy(np.concatenate([part.view(np.uint8) for part in parts]))

    def _unpacked(self, packet: Tensor, like: Tensor) -> Tensor:
        """Return flat values, as many as ``like`` has."""
        num_blocks, raw = -(-like.numel() // self._block), packet.numpy()
        first = num_blocks * like.itemsize
        norms = torch.from_numpy(raw[:first]).view(like.dtype)
        numbers, num_bits = raw[first : first + 8 * num_blocks].view(np.int32).reshape(2, -1)
        starts = np.cumsum(num_bits, dtype=np.int64) - num_bits
        reader = Reader(np.unpackbits(raw[first + 8 * num_blocks :]), starts)
        levels = np.zeros((num_blocks, self._block), np.int32)
        places = np.full(num_blocks, -1)
        for turn in range(int(numbers.max(initial=0))):
            streams = np.flatnonzero(numbers > turn)
            places[streams] += reader.number(streams)
            signs = 1 - 2 * reader.bit(streams)
            levels[streams, places[streams]] = signs * reader.number(streams)
        return self.restored(norms, torch.from_numpy(levels)).view(-1)[: like.numel()]


def _blocks_of(values: Tensor, block: int) -> Tensor:
    """Return values in rows of a block each; zeros fill the last one up."""
    missing = -values.numel() % block
    if missing:
        values = torch.cat([values, values.new_zeros(missing)])
    return values.view(-1, block)

"""What the ranks tell each other when a round ends: the only place that weights replicas."""

from dataclasses import astuple, dataclass, fields

import torch

from hpctrain.comm.communicator import Communicator
from hpctrain.core.errors import MismatchError
from hpctrain.gradients.sample_count import NUM_FLAGS, bits_of, flags_of


@dataclass(slots=True, kw_only=True)
class Report:
    """What one rank says; or the sum over all ranks."""

    weight: float = 1.0
    """How much this rank's replica counts; 0 where it sits out."""
    has_count: float = 0.0
    """Whether the weight is a number of samples."""
    takes_part: float = 1.0
    """Whether this rank is part of the round."""
    outdated: float = 0.0
    """Whether tensors have changed since the buckets were laid out."""
    step: float = 0.0
    """Steps that this rank has taken."""
    step_squared: float = 0.0
    step_s: float = 0.0
    """Duration of a step in this round, without averaging."""
    round_s: float = 0.0
    """What the averaging before has cost this rank, in seconds."""
    drift: float = 0.0
    """Squared distance of this replica from the mean, in the last averaging."""


class RoundMessage:
    """A small sum over all ranks, before replicas travel and whenever flags must be known."""

    def __init__(self, comm: Communicator) -> None:
        """Make the message. Collective."""
        self.flags = 0
        """Bits of this rank."""
        self.raised_flags = 0
        """Bits that any rank had in the last message; the same on every rank."""
        self._comm = comm
        self._message = comm.new_bucket(len(fields(Report)) + NUM_FLAGS, torch.float64)

    def exchange(self, own: Report) -> Report:
        """Return the sum of all ranks' reports. Collective.

        Raises:
            MismatchError: the ranks have taken different numbers of steps, or only some of those
                that take part count samples; on every rank.
        """
        flat = self._message.flat
        flat.copy_(torch.tensor((*astuple(own), *bits_of(self.flags)), dtype=torch.float64))
        self._comm.allreduce_(self._message).wait()
        values = flat.tolist()
        names = [item.name for item in fields(Report)]
        total = Report(**dict(zip(names, values, strict=False)))
        self.raised_flags = flags_of(values[len(names) :])
        size = self._comm.size
        if total.step_squared * size != total.step**2:
            raise MismatchError(
                f"a round ends on all ranks after the same step, they have taken "
                f"{total.step / size:g} on average and this one {own.step:g}; call skip_step() "
                f"on a rank that does not take a step"
            )
        if total.has_count not in (0, total.takes_part):
            raise MismatchError(
                f"set_num_samples must be called by all ranks or by none, {total.has_count:.0f} "
                f"of {total.takes_part:.0f} have called it; call it on every rank"
            )
        return total

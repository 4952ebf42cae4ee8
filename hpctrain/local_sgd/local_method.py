"""Base class of all methods whose ranks take local steps."""

import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any, ClassVar

from torch import nn
from torch.optim import Optimizer

from hpctrain.collectives.parameters import broadcast_parameters
from hpctrain.comm.common_block import CommonBlock
from hpctrain.compress.by_name import Compressing
from hpctrain.core.errors import ConfigError
from hpctrain.core.torch_compat import dynamo_disable
from hpctrain.gradients.optimizer import METHOD_MARK, require_plain
from hpctrain.gradients.sample_count import NUM_FLAGS, check_count
from hpctrain.local_sgd.federated import Federated, LocalGradients
from hpctrain.local_sgd.replica import Exchange, Replica
from hpctrain.local_sgd.replica_weight import SampleSums
from hpctrain.local_sgd.round_clock import RoundClock
from hpctrain.local_sgd.rounds import Rounds
from hpctrain.local_sgd.state_fields import Fields, StateFields
from hpctrain.local_sgd.synchronous_gradients import SynchronousGradients
from hpctrain.runtime import world

SWITCH = 1 << (NUM_FLAGS - 1)
"""The flag with which one rank changes the phase of all ranks; flags of users are below it."""

_PLAIN = Federated()


class LocalMethod(CommonBlock, StateFields):
    """Exchanges replicas between ranks after some of the steps of an optimizer.

    The training loop does not change. All ranks take the same number of steps. The end of a
    ``with`` block ends the round, after which all ranks have one model, and removes the hooks. If
    an error ends the block on some ranks, ranks that wait at its end raise within seconds.

    A synchronization averages, by name, all trained parameters and frozen parameters that have
    changed since their last average. All ranks freeze, unfreeze and add parameters after the same
    step.

    A subclass implements ``_after_step`` and ``_end_round``.

    Args:
        model: has equal parameters and buffers on every rank.
        optimizer: a plain optimizer of torch.
        compression: codec of tensors that are sent between all ranks.
        federated: selection of the ranks of a round, and options of their local steps.

    Raises:
        ConfigError: the optimizer averages gradients or has a local method already, or the method
            does not support ``federated``.
        NotInitializedError: ``hpctrain.init()`` was not called.
    """

    _SHARED: ClassVar[Fields] = {
        "step": "rounds.step",
        "number": "rounds.number",
        "exchange": "_exchange",
        "draw": "rounds.draw",
    }
    _OWN: ClassVar[Fields] = {
        "start": "rounds.start",
        "agrees": "rounds.agrees",
        "takes_part": "rounds.takes_part",
        "drift": ("rounds.own_drift", "rounds.drift"),
        "samples": "_samples[]",
        "changed": "replica",
        "wants_switch": "_wants_switch",
        "codecs": "_synchronous",
        "round_model": "_gradients",
    }

    def __init__(
        self,
        model: nn.Module,
        optimizer: Optimizer,
        *,
        compression: Compressing | None = None,
        federated: Federated = _PLAIN,
    ) -> None:
        """Broadcast the model of rank 0 and hook the optimizer. Collective."""
        self._optimizer = optimizer
        require_plain(type(self).__name__, self._optimizer)
        if hasattr(optimizer, METHOD_MARK):
            raise ConfigError(
                f"an optimizer must have at most one local method at a time, but "
                f"{type(self).__name__} follows {getattr(optimizer, METHOD_MARK)}; end its block, "
                f"or call its close(), before"
            )
        here = world.current()
        self._comm, self._topology, self._presence = here.comm, here.topology, here.presence
        compression = compression or "none"
        self.clock = RoundClock()
        """Decides when the ranks synchronize between averagings."""
        self._synchronous = SynchronousGradients(here, optimizer, compression)
        self.rounds = Rounds(self._comm, self.clock, self._synchronous)
        self.rounds.draw = federated.draw(self._comm, type(self).__name__)
        self._gradients = LocalGradients(model, optimizer, federated.proximal)
        self.replica = Replica(self._comm, model, optimizer)
        """This rank's model and optimizer state."""
        self.communication_seconds = 0.0  # time that the last step waited for other ranks
        self._exchange = Exchange(here, self.replica, self.rounds, compression)
        self._samples = [SampleSums()]
        self.rounds.samples = self._samples[0]
        self._flags, self._wants_switch = 0, False
        broadcast_parameters(model.state_dict())
        self.replica.all_agree()
        self._hooks = [
            optimizer.register_step_pre_hook(lambda _, *arguments: self._begin_step(*arguments)),
            optimizer.register_step_post_hook(lambda *_: self._end_step()),
        ]
        setattr(optimizer, METHOD_MARK, type(self).__name__)

    # -- for the training loop ---------------------------------------------------------------

    def set_num_samples(self, num_samples: float, nominal: float = 1.0) -> None:
        """Set the number of samples over which this rank's loss is a mean, before each backward.

        Replicas are weighted by their samples since the last averaging, gradients of synchronous
        steps by the samples of the step. Local, but all ranks call it, or none does.

        Args:
            num_samples: number of samples of this rank in the next step; may be 0.
            nominal: the usual count, the same on every rank.

        Raises:
            ConfigError: the count is not valid, or the block has ended.
        """
        self._require_open()
        check_count(num_samples, nominal)
        for samples in self._samples:
            samples.add(num_samples, nominal)
        self._synchronous.set_num_samples(num_samples, nominal)

    def set_backward_passes_per_step(self, passes: int) -> None:
        """Accumulate this number of passes before gradients are averaged, from the next step on.

        Local; a rank may take fewer passes than others, at least 1.
        """
        self._synchronous.set_passes(passes)

    def take_part(self, *, takes_part: bool) -> None:
        """Include this rank's replica in averagings from now on, or exclude it.

        An excluded rank makes the same calls and takes the mean of the other ranks, to which it
        adds nothing. If all ranks are excluded, a round changes nothing, except for the last one,
        in which all ranks count the same. Local.
        """
        self.rounds.takes_part = takes_part

    def skip_step(self) -> None:
        """Count a step that this rank does not take: no data, or ``inf`` in its gradients.

        It replaces ``optimizer.step()``, which ``GradScaler`` may leave out. A step of gradients
        that all ranks average is skipped by all or by none: ``MismatchError`` on all ranks in the
        next step, or at the end. If other ranks set numbers of samples, call
        ``set_num_samples(0)`` before.
        """
        self._require_open()
        self._average_gradients(is_skipped=True)
        self._gradients.see(self.rounds.number)
        self._synchronous.skip()
        self._end_step(is_skipped=True)

    @dynamo_disable
    def synchronize(self) -> None:
        """Average the gradients of a synchronous step, unless ``backward()`` has. Collective.

        Needed only where a rank skips ``backward`` and gradients are clipped.

        Raises:
            ConfigError: the optimizer has become one that averages gradients itself.
        """
        self._average_gradients()

    def finish(self) -> None:
        """End the round now, after which all ranks have identical models. Collective.

        Raises:
            MismatchError: the ranks have taken different numbers of steps.
            RankLostError: some ranks wait elsewhere, after a few seconds.
            ConfigError: the block has ended.
        """
        self._require_open()
        if self._presence is None or self._block is None:
            self._finish()
            return
        with self._presence.blocks.at_end(self._block):
            self._finish()

    def _steps_begun(self) -> int:
        return self.rounds.step + self._synchronous.is_in_step

    def _finish(self) -> None:
        self._gradients.begin_round()
        if self.rounds.agrees:
            self.rounds.synchronize()
            self.replica.average_buffers()  # of synchronous steps
        else:
            self._end_round()
            if not self.rounds.agrees:  # no rank that takes part has samples in this round
                self._end_round_alike()

    def _end_round_alike(self) -> None:
        """Average with equal weights of all replicas."""
        takes_part, self.rounds.takes_part = self.rounds.takes_part, True
        for samples in self._samples:
            if samples.is_counted:
                samples.add(1.0, 1.0)
        self._end_round()
        self.rounds.takes_part = takes_part

    @contextmanager
    def averaged(self) -> Iterator[None]:
        """Replace the model by the mean of all replicas inside the block. Collective.

        The weights are the same as at the end of a round.
        """
        if self.rounds.agrees:
            yield
            return
        with self.replica.as_mean(self.rounds.share()):
            yield

    def close(self) -> None:
        """Remove the hooks. Local."""
        if self._hooks:
            delattr(self._optimizer, METHOD_MARK)
        while self._hooks:
            self._hooks.pop().remove()
        self._synchronous.clear()

    def _begin_block(self) -> None:
        self._require_open()

    def _end_block(self) -> None:
        self.finish()

    def _leave_block(self, error: BaseException | None) -> None:
        del error  # close() does the same after an error
        self.close()

    # -- facts and flags -----------------------------------------------------------------------

    @property
    def takes_part(self) -> bool:
        """Whether this rank's current step counts: it takes part, and is drawn.

        With ``fraction`` below 1 a step that does not count changes neither parameters nor the
        optimizer's state: a rank may leave it out by ``skip_step()``, with the same result.
        """
        return not self._is_in_round or self.rounds.counts

    @property
    def facts(self) -> dict[str, Any]:
        """Human-readable figures, the same on every rank.

        ``bytes_saved`` is relative to gradients that are averaged in every step. ``drawn`` are
        the ranks of the current round, with ``fraction`` below 1.
        """
        draw = self.rounds.draw
        gradients = self.rounds.step * sum(p.nbytes for _, p in self.replica.parameters())
        return {
            "rounds": self.rounds.number,
            "bytes_sent": self._exchange.bytes_sent,
            "bytes_saved": gradients - self._exchange.bytes_sent,
            "drift": self.rounds.drift,
            **({"drawn": draw.ranks(self.rounds.number)} if draw.is_partial else {}),
        }

    @property
    def raised_flags(self) -> int:
        """Bits of any rank if the ranks have synchronized in the last step; else 0."""
        if not self.clock.has_synchronized:
            return 0
        if self._comm.size == 1:
            return self.rounds.flags & ~SWITCH
        return self.rounds.raised_flags & ~SWITCH

    @property
    def is_synchronous(self) -> bool:
        """Whether all ranks take the current step together, with averaged gradients."""
        return self._comm.size == 1 or self._synchronous.are_of_all

    @property
    def leads_step(self) -> bool:
        """Whether this rank is the first of the ranks that take the current step together."""
        return self._synchronous.leads_step

    @property
    def gradient_flags(self) -> int:
        """Bits of the ranks whose gradients are averaged in this step.

        Known after ``backward``, or after ``synchronize``; the bits of this rank alone where it
        steps by its own gradient.
        """
        return (self._synchronous.raised_flags | self._flags) & ~SWITCH

    def raise_flags(self, flags: int) -> None:
        """Send bits that every rank reads from ``raised_flags`` after the next synchronization.

        Args:
            flags: bits 0 to 2.

        Raises:
            ConfigError: there are other bits.
        """
        if not 0 <= flags < SWITCH:
            raise ConfigError(f"flags must be bits 0 to 2, got {flags:#b}")
        self._flags = flags
        self._raise()

    # -- states ------------------------------------------------------------------------------

    def state_dict(self) -> dict[str, Any]:
        """Return the state of the method, without model and optimizer. Collective.

        In the middle of a round every rank has its own model and optimizer state: save it on
        all ranks.
        """
        return {"shared": self.shared_state(), "own": self.own_state()}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Continue from a state of the same rank of the same number of ranks. Collective."""
        self.load_shared_state(state["shared"])
        self.load_own_state(state["own"])

    def load_shared_state(self, state: Mapping[str, Any]) -> None:
        """Begin a round from a state of any number of ranks; drop averagings in flight."""
        draw = self.rounds.draw.shared_state()  # for older states, which have none
        super().load_shared_state({"draw": draw, **state})
        self._start_again()

    def load_own_state(self, state: Mapping[str, Any]) -> None:
        """Continue in the middle of a round, after ``load_shared_state``. Collective."""
        super().load_own_state({"round_model": {}, **state})  # which older states lack
        self._raise()

    def _require_open(self) -> None:
        if not self._hooks:
            name = type(self).__name__
            raise ConfigError(f"this {name} has ended with its block; make a new one")

    # -- for methods -------------------------------------------------------------------------

    def _average_gradients(self, *, is_skipped: bool = False) -> None:
        require_plain(type(self).__name__, self._optimizer)
        self._synchronous.average(is_skipped=is_skipped)

    def _start_again(self) -> None:
        """Begin a round after a shared state was loaded: all ranks have the same parameters."""
        self.rounds.start_again()
        self._gradients.begin_round()
        self.replica.all_agree()
        for samples in self._samples:
            samples.clear()

    def _after_step(self) -> None:
        """Exchange replicas if this is due after a step."""
        raise NotImplementedError

    def _end_round(self) -> None:
        """Average all tensors of the method now. Collective."""
        raise NotImplementedError

    def _raise(self) -> None:
        flags = self._flags | (SWITCH if self._wants_switch else 0)
        self.rounds.flags = flags
        # A rank whose learning rate has dropped steps by another rate than the others.
        self._synchronous.raise_flags(flags, may_differ=self._wants_switch)

    @property
    def _is_in_round(self) -> bool:
        """Whether the current step is part of a round."""
        return True

    @dynamo_disable
    def _begin_step(self, args: Sequence[Any], options: Mapping[str, Any]) -> None:
        self._average_gradients()
        is_partial = self.rounds.draw.is_partial
        if not (is_partial or self._gradients.are_proximal) or not self._is_in_round:
            return
        if any(map(callable, (*args, *options.values()))):
            raise ConfigError(
                "fraction and proximal must change gradients before a step, but a closure "
                "computes them in it; call backward() and then optimizer.step() without one"
            )
        self._gradients.see(self.rounds.number)
        counts = self.rounds.counts and self._samples[0].counts_step
        self._gradients.replace(counts=counts or not is_partial)

    @dynamo_disable
    def _end_step(self, *, is_skipped: bool = False) -> None:
        self._gradients.put_back()
        synchronous = self.is_synchronous
        if synchronous:  # read now, since the phase may end with this step
            self.rounds.raised_flags = self._synchronous.raised_flags
        self.rounds.count_step(synchronous=synchronous)
        for samples in self._samples:
            samples.end_step(is_skipped=is_skipped)
        self.replica.roster.note_step()
        self.communication_seconds, num_bytes = self._synchronous.end_step()
        self._exchange.bytes_sent += num_bytes
        start = time.perf_counter()
        self._after_step()
        if self.clock.is_due(self.rounds.step, busy=self._exchange.is_under_way):
            self.rounds.synchronize()
        seconds = time.perf_counter() - start
        self.clock.waited_s += seconds
        self.communication_seconds += seconds
        self.clock.resume()

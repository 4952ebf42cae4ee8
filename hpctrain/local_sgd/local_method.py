"""Base class of the methods whose ranks take local steps and average their replicas."""

import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any, ClassVar

from torch import nn
from torch.optim import Optimizer

from hpctrain.collectives.parameters import broadcast_parameters
from hpctrain.comm.common_block import CommonBlock
from hpctrain.compress.by_name import Compressing
from hpctrain.core.checks import require_open
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
"""Flag with which a rank requests the next phase on all ranks; flags of users are lower bits."""

_PLAIN = Federated()


class LocalMethod(CommonBlock, StateFields):
    """Exchanges replicas of the model between ranks after some steps of an optimizer.

    The training loop runs in the ``with`` block of the method; all ranks take the same number of
    steps. A round consists of local steps, and ends with an average. The end of the block ends the
    round, so that all ranks have the same model, and removes the hooks. If an error ends the block
    on some ranks, the ranks that wait at the end raise an error within seconds.

    Ranks average, by name, all trained parameters, and frozen parameters that have changed since
    their last average. All ranks freeze, unfreeze and add parameters after the same step.

    A subclass implements ``_after_step`` and ``_end_round``.

    The constructor is collective: it broadcasts the model of rank 0 and hooks the optimizer.

    Args:
        model: module with equal parameters and buffers on every rank.
        optimizer: plain torch optimizer.
        compression: codec of the tensors that are sent between all ranks.
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
        self._optimizer = optimizer
        require_plain(type(self).__name__, self._optimizer)
        if hasattr(optimizer, METHOD_MARK):
            raise ConfigError(
                f"an optimizer can only have one local or asynchronous method at a time, but "
                f"{getattr(optimizer, METHOD_MARK)} already uses the optimizer passed to "
                f"{type(self).__name__}; first end the block of "
                f"{getattr(optimizer, METHOD_MARK)}, or call its close()"
            )
        here = world.current()
        self._comm, self._topology, self._presence = here.comm, here.topology, here.presence
        compression = compression or "none"
        self.clock = RoundClock()
        """Clock that decides when the ranks synchronize between averages."""
        self._synchronous = SynchronousGradients(here, optimizer, compression)
        self.rounds = Rounds(self._comm, self.clock, self._synchronous)
        self.rounds.draw = federated.draw(self._comm, type(self).__name__)
        self._gradients = LocalGradients(model, optimizer, federated.proximal)
        self.replica = Replica(self._comm, model, optimizer)
        """Model and optimizer state of this rank."""
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
        """Set the number of samples in this rank's mean loss, before each backward.

        Replicas are weighted by their samples since the last average, gradients of synchronous
        steps by the samples of the step. Local, but all ranks call this method, or none does.

        Args:
            num_samples: number of samples of this rank in the next step; may be 0.
            nominal: usual number of samples, the same on every rank.

        Raises:
            ConfigError: a number is not valid, or the block has ended.
        """
        self._require_open()
        check_count(num_samples, nominal)
        for samples in self._samples:
            samples.add(num_samples, nominal)
        self._synchronous.set_num_samples(num_samples, nominal)

    def set_backward_passes_per_step(self, passes: int) -> None:
        """Set the number of backward passes per average of gradients, from the next step on.

        Local. A rank may take fewer passes than other ranks, at least 1.
        """
        self._require_open()
        self._synchronous.set_passes(passes)

    def take_part(self, *, takes_part: bool) -> None:
        """Include this rank's replica in averages from now on, or exclude the replica. Local.

        An excluded rank makes the same calls and receives the mean of the other ranks. If all
        ranks are excluded, a round changes nothing, except for the last round, in which all
        replicas have equal weights.
        """
        self._require_open()
        self.rounds.takes_part = takes_part

    def skip_step(self) -> None:
        """Count a step that this rank does not take, for lack of data or after an overflow.

        Called in place of ``optimizer.step()``, which ``GradScaler`` may skip. A step in which all
        ranks average gradients must be skipped by all ranks or by none; otherwise all ranks raise
        ``MismatchError`` in the next step, or at the end of the block. If other ranks set numbers
        of samples, call ``set_num_samples(0)`` before.
        """
        self._require_open()
        self._average_gradients(is_skipped=True)
        self._gradients.copy_model(self.rounds.number)
        self._synchronous.skip()
        self._end_step(is_skipped=True)

    @dynamo_disable
    def synchronize(self) -> None:
        """Average the gradients of a synchronous step that ``backward()`` has not averaged.

        Collective. Required only on a rank that skips ``backward``, before gradient clipping.

        Raises:
            ConfigError: the optimizer has become a ``DistributedOptimizer``, or the block has
                ended.
        """
        self._require_open()
        self._average_gradients()

    def finish(self) -> None:
        """End the round now, so that all ranks have identical models. Collective.

        Raises:
            MismatchError: the ranks have taken different numbers of steps.
            RankLostError: some ranks have left the block or wait in another call.
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
            self.replica.average_buffers()  # synchronous steps average gradients only
        else:
            self._end_round()
            if not self.rounds.agrees:  # no replica had a weight in this round
                self._end_round_equally()

    def _end_round_equally(self) -> None:
        """End the round with equal weights of all replicas."""
        takes_part, self.rounds.takes_part = self.rounds.takes_part, True
        for samples in self._samples:
            if samples.is_counted:
                samples.add(1.0, 1.0)
        self._end_round()
        self.rounds.takes_part = takes_part

    @contextmanager
    def averaged(self) -> Iterator[None]:
        """Replace the model by the mean of all replicas inside the block. Collective.

        Replicas are weighted as at the end of a round.
        """
        self._require_open()
        if self.rounds.agrees:
            yield
            return
        with self.replica.as_mean(self.rounds.share()):
            yield

    def close(self) -> None:
        """Remove the hooks from the optimizer. Local."""
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
        del error  # the hooks are removed in any case
        self.close()

    # -- figures and flags ---------------------------------------------------------------------

    @property
    def takes_part(self) -> bool:
        """Whether this rank's current step counts: the rank is included, and drawn for the round.

        With ``fraction`` below 1, a step that does not count changes neither parameters nor the
        optimizer's state, so a rank may call ``skip_step()`` instead, with the same result.
        """
        return not self._is_in_round or self.rounds.counts

    @property
    def facts(self) -> dict[str, Any]:
        """Human-readable figures, the same on every rank.

        ``bytes_saved`` is relative to an average of gradients in every step. ``drawn`` lists the
        ranks of the current round if ``fraction`` is below 1.
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
        """Bits that any rank raised; 0 if the ranks have not synchronized in the last step."""
        if not self.clock.has_synchronized:
            return 0
        if self._comm.size == 1:
            return self.rounds.flags & ~SWITCH
        return self.rounds.raised_flags & ~SWITCH

    @property
    def is_synchronous(self) -> bool:
        """Whether all ranks average gradients in the current step."""
        return self._comm.size == 1 or self._synchronous.are_of_all

    @property
    def leads_step(self) -> bool:
        """Whether this rank is the first of the ranks that average gradients in this step."""
        return self._synchronous.leads_step

    @property
    def gradient_flags(self) -> int:
        """Bits that were raised by any of the ranks that average gradients in this step.

        Valid after ``backward``, or after ``synchronize``. In a local step these are the bits of
        this rank.
        """
        return (self._synchronous.raised_flags | self._flags) & ~SWITCH

    def raise_flags(self, flags: int) -> None:
        """Send flags to all ranks, which read ``raised_flags`` after the next synchronization.

        Args:
            flags: bits 0 to 2.

        Raises:
            ConfigError: another bit is set, or the block has ended.
        """
        self._require_open()
        if not 0 <= flags < SWITCH:
            raise ConfigError(f"flags must be bits 0 to 2, got {flags:#b}; set other bits to 0")
        self._flags = flags
        self._raise()

    # -- states ------------------------------------------------------------------------------

    def state_dict(self) -> dict[str, Any]:
        """Return the state of the method, without model and optimizer. Collective.

        In the middle of a round every rank has its own model and optimizer state, which must be
        saved on all ranks.
        """
        return {"shared": self.shared_state(), "own": self.own_state()}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Continue from a state of the same rank and the same number of ranks. Collective."""
        self.load_shared_state(state["shared"])
        self.load_own_state(state["own"])

    def load_shared_state(self, state: Mapping[str, Any]) -> None:
        """Begin a round from a state of any number of ranks; averages in flight are dropped."""
        self._require_open()
        draw = self.rounds.draw.shared_state()  # for states of older versions
        super().load_shared_state({"draw": draw, **state})
        self._start_again()

    def load_own_state(self, state: Mapping[str, Any]) -> None:
        """Continue in the middle of a round, after ``load_shared_state``. Collective."""
        self._require_open()
        super().load_own_state({"round_model": {}, **state})  # for states of older versions
        self._raise()

    def _require_open(self) -> None:
        require_open(self._hooks, type(self).__name__, ConfigError)

    # -- for subclasses ----------------------------------------------------------------------

    def _average_gradients(self, *, is_skipped: bool = False) -> None:
        require_plain(type(self).__name__, self._optimizer)
        self._synchronous.average(is_skipped=is_skipped)

    def _start_again(self) -> None:
        """Begin a round after a shared state was loaded, with the same parameters on all ranks."""
        self.rounds.start_again()
        self._gradients.begin_round()
        self.replica.all_agree()
        for samples in self._samples:
            samples.clear()

    def _after_step(self) -> None:
        """Exchange replicas if due after this step; an exchange is collective."""
        raise NotImplementedError

    def _end_round(self) -> None:
        """Average all tensors of the method, and begin the next round. Collective."""
        raise NotImplementedError

    def _raise(self) -> None:
        flags = self._flags | (SWITCH if self._wants_switch else 0)
        self.rounds.flags = flags
        # After a drop of this rank's learning rate, weights may differ between ranks.
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
                "gradients must be computed before step() with fraction or proximal, but step() "
                "got a closure; call backward() and then optimizer.step() without a closure"
            )
        self._gradients.copy_model(self.rounds.number)
        counts = self.rounds.counts and self._samples[0].counts_step
        self._gradients.replace(counts=counts or not is_partial)

    @dynamo_disable
    def _end_step(self, *, is_skipped: bool = False) -> None:
        self._gradients.restore()
        synchronous = self.is_synchronous
        if synchronous:  # read the flags now: the synchronous phase may end with this step
            self.rounds.raised_flags = self._synchronous.raised_flags
        self.rounds.count_step(synchronous=synchronous)
        for samples in self._samples:
            samples.end_step(is_skipped=is_skipped)
        self.replica.roster.note_step()
        self.communication_seconds, num_bytes = self._synchronous.end_step()
        self._exchange.bytes_sent += num_bytes
        start = time.perf_counter()
        self._after_step()
        if self.clock.is_due(self.rounds.step, busy=self._exchange.is_in_flight):
            self.rounds.synchronize()
        seconds = time.perf_counter() - start
        self.clock.waited_s += seconds
        self.communication_seconds += seconds
        self.clock.resume()

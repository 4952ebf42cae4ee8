"""The base of all methods whose ranks take steps of their own."""

import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from functools import partial
from typing import Any, ClassVar

from torch import nn
from torch.optim import Optimizer

from hpctrain.collectives.parameters import broadcast_parameters
from hpctrain.comm.common_block import CommonBlock
from hpctrain.comm.communicator import Communicator
from hpctrain.compress.by_name import Compressing, codec_for
from hpctrain.compress.codec import Identity
from hpctrain.core.errors import ConfigError
from hpctrain.core.torch_compat import dynamo_disable
from hpctrain.gradients.bucket_reducer import Reducer
from hpctrain.gradients.optimizer import METHOD_MARK, require_plain
from hpctrain.gradients.parameter_names import Grouping, named, names_of
from hpctrain.gradients.reduction import Reduction
from hpctrain.gradients.sample_count import NUM_FLAGS, SampleCount, check_count
from hpctrain.gradients.step_counter import StepCounter
from hpctrain.gradients.step_sync import StepSync
from hpctrain.local_sgd.federated import Federated, LocalGradients
from hpctrain.local_sgd.replica import Exchange, Replica
from hpctrain.local_sgd.rounds import Fields, Rounds, SampleSums, Share, StateFields
from hpctrain.runtime import world

SWITCH = 1 << (NUM_FLAGS - 1)
"""The flag by which one rank lets all change their phase; those of users are below it."""

_PLAIN = Federated()


class LocalMethod(CommonBlock, StateFields):
    """Hooks an optimizer; after each of its steps the method says what the ranks exchange.

    The training loop stays as it is. All ranks take equally many steps. As a context manager: a
    round ends with the block, so that all ranks have one model after it, and the hooks are gone.
    Where an error leads some ranks out of the block, those that wait in it raise within seconds.

    What is averaged are the parameters that are trained when the ranks meet, and those that have
    changed before, by name. All ranks freeze, unfreeze and add parameters after the same step.

    A method says in its docstring what it does, and does it in ``_after_step`` and ``_end_round``.
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
        "codecs": "_codec_states",
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
        """Give all ranks the model of rank 0 and hook the optimizer. Collective.

        Raises ``ConfigError``: the optimizer averages gradients by itself, has a local method
        already, or the method cannot be ``federated`` like that. ``NotInitializedError``:
        ``hpctrain.init()`` was not called.
        """
        self._optimizer = optimizer
        require_plain(type(self).__name__, self._optimizer)
        if hasattr(optimizer, METHOD_MARK):
            raise ConfigError(
                f"an optimizer has one local method at a time, {type(self).__name__} comes beside "
                f"{getattr(optimizer, METHOD_MARK)}; end its block, or call its close(), before"
            )
        here = world.current()
        self._comm, self._topology, self._presence = here.comm, here.topology, here.presence
        compression = compression or "none"
        self._plan, self._compression, self._note = here.plan, compression, here.last_call.note
        self._names, self._reducers = names_of(optimizer, None), list[Reducer]()
        self.rounds = Rounds(self._comm)  # counts steps and rounds
        self.rounds.draw = federated.draw(self._comm, type(self).__name__)
        self.rounds.reducers = self._reducers
        self._federated = federated
        self._gradients = LocalGradients(model, optimizer, federated.proximal)
        self.replica = Replica(self._comm, model, optimizer)
        """This rank's model and optimizer state."""
        self.communication_seconds = 0.0  # time in which the last step waited for other ranks
        self._exchange = Exchange(here, self.replica, self.rounds, compression)
        self._samples = [SampleSums()]
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
        """Say how many samples this rank's loss is the mean of, before each backward.

        Replicas are weighted by their samples since the last averaging, gradients of synchronous
        steps by those of the step. Not collective, but every rank calls it, or none does.

        Args:
            num_samples: of this rank in the next step; 0 where it has none.
            nominal: the usual count, the same on every rank.

        Raises:
            ConfigError: the count is not valid, or the block has ended.
        """
        self._require_open()
        check_count(num_samples, nominal)
        for samples in self._samples:
            samples.add(num_samples, nominal)
        for reducer in self._reducers:
            reducer.set_num_samples(num_samples, nominal)

    def set_backward_passes_per_step(self, passes: int) -> None:
        """Let so many passes be added up before gradients are averaged, from the next step on.

        Not collective; a rank may take fewer of them than others, at least 1.
        """
        for reducer in self._reducers:
            reducer.set_passes(passes)

    def take_part(self, *, takes_part: bool) -> None:
        """Let this rank's replica count in averagings from now on, or sit out.

        A rank that sits out makes the same calls and takes over the mean of the others, to which
        it adds nothing. If all sit out, a round changes nothing, but for the last one, in which
        then all count alike. Not collective.
        """
        self.rounds.takes_part = takes_part

    def skip_step(self) -> None:
        """Count a step that this rank does not take: no data, or ``inf`` in its gradients.

        It stands in the place of ``optimizer.step()``, which ``GradScaler`` may leave out. A step
        of gradients that all ranks average is skipped by all or by none: ``MismatchError`` on all
        at the next one, or at the end. Where others say how many samples they have, call
        ``set_num_samples(0)`` before.
        """
        self._require_open()
        self._average_gradients(is_skipped=True)
        self._gradients.see(self.rounds.number)
        for reducer in self._reducers:
            if reducer.is_on:
                reducer.steps.skip()
        self._end_step(is_skipped=True)

    @dynamo_disable
    def synchronize(self) -> None:
        """Average the gradients of a synchronous step, if ``backward()`` has not. Collective.

        Needed only where a rank skips ``backward`` and gradients are clipped.

        Raises:
            ConfigError: the optimizer has become one that averages gradients by itself.
        """
        self._average_gradients()

    def finish(self) -> None:
        """End the round here, so that all ranks have one model. Collective.

        Raises:
            MismatchError: the ranks have not taken equally many steps; ``RankLostError`` after a
                few seconds where some wait elsewhere; ``ConfigError``: the block has ended.
        """
        self._require_open()
        if self._presence is None or self._block is None:
            self._finish()
            return
        with self._presence.at_end(self._block):
            self._finish()

    def _steps_begun(self) -> int:
        return self.rounds.step + any(r.is_on and r.is_in_step for r in self._reducers)

    def _finish(self) -> None:
        self._gradients.begin_round()
        if self.rounds.agrees:
            self.rounds.meet()
            self.replica.average_buffers()  # of synchronous steps
        else:
            self._end_round()
            if not self.rounds.agrees:  # nobody has samples since the replicas parted, or sits in
                self._end_round_alike()

    def _end_round_alike(self) -> None:
        """Average with all replicas counting alike."""
        takes_part, self.rounds.takes_part = self.rounds.takes_part, True
        for samples in self._samples:
            if samples.is_counted:
                samples.add(1.0, 1.0)
        self._end_round()
        self.rounds.takes_part = takes_part

    @contextmanager
    def averaged(self) -> Iterator[None]:
        """Let the model be the mean of all replicas inside, to test or save it. Collective.

        They count as they would if the block ended here.
        """
        if self.rounds.agrees:
            yield
            return
        with self.replica.as_mean(self.share()):
            yield

    def share(self) -> Share:
        """Return what this rank's replica counts in a mean of all ranks' here. Collective."""
        return self.rounds.share(self._samples[0])

    def close(self) -> None:
        """Remove the hooks. Not collective."""
        if self._hooks:
            delattr(self._optimizer, METHOD_MARK)
        while self._hooks:
            self._hooks.pop().remove()
        self._reducers.clear()

    def _begin_block(self) -> None:
        self._require_open()

    def _end_block(self) -> None:
        self.finish()

    def _leave_block(self, error: BaseException | None) -> None:  # noqa: ARG002 - of others
        self.close()

    # -- what is known -----------------------------------------------------------------------

    @property
    def takes_part(self) -> bool:
        """Whether what this rank does in the present step counts: it sits in, and is drawn.

        With ``fraction`` below 1 a step that does not count changes neither parameters nor the
        optimizer's state: a rank may leave it out by ``skip_step()``, with the same result.
        """
        return not self._is_in_round or self.rounds.counts

    @property
    def facts(self) -> dict[str, Any]:
        """Figures for people and records, the same on every rank.

        ``bytes_saved`` compares with gradients that are averaged in every step. ``drawn`` are the
        ranks of the present round, with ``fraction`` below 1.
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
        """Bits that any rank had raised when the ranks met in the last step; else 0."""
        if not self.rounds.has_met:
            return 0
        if self._comm.size == 1:
            return self.rounds.flags & ~SWITCH
        return self.rounds.raised_flags & ~SWITCH

    @property
    def is_synchronous(self) -> bool:
        """Whether all ranks take the present step together, by averaged gradients."""
        alone = self._comm.size == 1
        return alone or any(r.is_on and self._is_of_all(r) for r in self._reducers)

    @property
    def leads_step(self) -> bool:
        """Whether this rank is the first of those that take the present step together."""
        return all(r.reduction.leads for r in self._reducers if r.is_on)

    @property
    def gradient_flags(self) -> int:
        """Bits that any of the ranks had raised whose gradients are averaged in this step.

        Known after ``backward``, or after ``synchronize`` in its place; those of this rank alone
        where it takes a step of its own.
        """
        return (self._flags_of_gradients | self._flags) & ~SWITCH

    def raise_flags(self, flags: int) -> None:
        """Let every rank see these bits in ``raised_flags`` when the ranks meet.

        Args:
            flags: bits 0 to 2.

        Raises:
            ConfigError: there are other bits.
        """
        if not 0 <= flags < SWITCH:
            raise ConfigError(f"flags are bits 0 to 2, got {flags:#b}")
        self._flags = flags
        self._raise()

    # -- states ------------------------------------------------------------------------------

    def state_dict(self) -> dict[str, Any]:
        """Return all that this rank's next step depends on, beside model and optimizer.

        Collective. In the middle of a round every rank has a model and an optimizer state of its
        own: keep those of all ranks.
        """
        return {"shared": self.shared_state(), "own": self.own_state()}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Go on from a state of the same rank of as many ranks. Collective."""
        self.load_shared_state(state["shared"])
        self.load_own_state(state["own"])

    def load_shared_state(self, state: Mapping[str, Any]) -> None:
        """Begin a round after a state of any number of ranks; what was on its way is dropped."""
        draw = self.rounds.draw.shared_state()  # for older states, which have none
        super().load_shared_state({"draw": draw, **state})
        self._start_again()

    def load_own_state(self, state: Mapping[str, Any]) -> None:
        """Go on in the middle of a round, after ``load_shared_state``. Collective."""
        super().load_own_state({"round_model": {}, **state})  # which older states lack
        self._raise()

    @property
    def _codec_states(self) -> list[dict[str, Any]]:
        """What gradients of all ranks or of a node have not sent yet."""
        return [reducer.reduction.codec.state_dict() for reducer in self._reducers]

    @_codec_states.setter
    def _codec_states(self, states: Sequence[Mapping[str, Any]]) -> None:
        for reducer, state in zip(self._reducers, states, strict=True):
            if reducer.reduction.codec.fits(state):
                reducer.reduction.codec.load_state_dict(state)

    def _require_open(self) -> None:
        if not self._hooks:
            name = type(self).__name__
            raise ConfigError(f"this {name} has ended with its block; make a new one")

    # -- for methods -------------------------------------------------------------------------

    def _reducer_over(self, comm: Communicator) -> Reducer | None:
        """Make what averages gradients over some ranks while it is on, as at most one is.

        Collective over them; None for a single rank. Between all ranks gradients travel
        compressed, inside a node they are whole.
        """
        if comm.size == 1:
            return None
        is_of_all = comm.size == self._comm.size
        codec = codec_for(self._compression) if is_of_all else Identity()
        check_weights = world.current().settings.check_weights
        # Ranks of a node may skip steps alone: replicas meet at the end of the round.
        steps = StepCounter(StepSync(comm), check_weights, may_skip_alone=not is_of_all)
        made = Reducer(
            Reduction(comm, self._plan, codec, Grouping(), SampleCount(), steps),
            partial(named, lambda: self._optimizer, self._names),
            self._note,
            is_exclusive=False,
        )
        self._reducers.append(made)
        return made

    def _is_of_all(self, reducer: Reducer) -> bool:
        return reducer.reduction.num_ranks == self._comm.size

    @property
    def _flags_of_gradients(self) -> int:
        """Bits that any rank had raised for the last step, while a reducer is on."""
        return next((r.steps.raised_flags for r in self._reducers if r.is_on), 0)

    def _average_gradients(self, *, is_skipped: bool = False) -> None:
        require_plain(type(self).__name__, self._optimizer)
        for reducer in self._reducers:
            reducer.finish(is_skipped=is_skipped)

    def _start_again(self) -> None:
        """Begin a round, all ranks with the same parameters, after a shared state was loaded."""
        self.rounds.start_again()
        self._gradients.begin_round()
        self.replica.all_agree()
        for samples in self._samples:
            samples.clear()

    def _after_step(self) -> None:
        """Do what is due after a step."""
        raise NotImplementedError

    def _end_round(self) -> None:
        """Average all that is averaged, here and now. Collective."""
        raise NotImplementedError

    def _raise(self) -> None:
        flags = self._flags | (SWITCH if self._wants_switch else 0)
        self.rounds.flags = flags
        for reducer in self._reducers:
            reducer.steps.flags = flags
            reducer.steps.may_differ = self._wants_switch  # by a learning rate of its own

    @property
    def _is_in_round(self) -> bool:
        """Whether the present step is one of a round."""
        return True

    @dynamo_disable
    def _begin_step(self, args: Sequence[Any], options: Mapping[str, Any]) -> None:
        self._average_gradients()
        is_partial = self.rounds.draw.is_partial
        if not (is_partial or self._federated.proximal) or not self._is_in_round:
            return
        if any(map(callable, (*args, *options.values()))):
            raise ConfigError(
                "fraction and proximal change gradients in front of a step, and a closure "
                "calculates them inside; call backward() and then optimizer.step() without one"
            )
        self._gradients.see(self.rounds.number)
        counts = self.rounds.counts and self._samples[0].counts_step
        self._gradients.replace(counts=counts or not is_partial)

    @dynamo_disable
    def _end_step(self, *, is_skipped: bool = False) -> None:
        self._gradients.put_back()
        synchronous = self.is_synchronous
        if synchronous:  # looked at here, as the phase may end with this step
            self.rounds.raised_flags = self._flags_of_gradients
        self.rounds.count_step(synchronous=synchronous)
        for samples in self._samples:
            samples.end_step(is_skipped=is_skipped)
        self.replica.roster.note_step()
        self.communication_seconds = 0.0
        for reducer in self._reducers:
            if reducer.is_on:
                self.communication_seconds += reducer.exposed_seconds
                if self._is_of_all(reducer):
                    self._exchange.bytes_sent += reducer.reduction.num_bytes
                reducer.end_step()
        start = time.perf_counter()
        self._after_step()
        if self.rounds.is_meeting_due(busy=self._exchange.is_under_way):
            self.rounds.meet()
        seconds = time.perf_counter() - start
        self.rounds.waited_s += seconds
        self.communication_seconds += seconds
        self.rounds.resume_clock()

"""State of a run: all that makes its next step what it would have been without a stop."""

import random
from collections.abc import Mapping, Sequence
from contextlib import nullcontext
from dataclasses import asdict, dataclass, field
from typing import Any

import numpy as np
import torch
from torch import Tensor

from hpctrain.checkpoint.format.state_hash import state_hash
from hpctrain.checkpoint.format.state_tree import mapped
from hpctrain.comm.agreement import by_rank
from hpctrain.comm.communicator import Communicator
from hpctrain.compress.codec import Codec
from hpctrain.core.errors import CheckpointError, NotFiniteError
from hpctrain.gradients.replica_check import require_equal_replicas
from hpctrain.local_sgd.local_method import LocalMethod
from hpctrain.optim.noise_scale import NoiseScale
from hpctrain.parallel.parts import local
from hpctrain.train.async_exchange import AsyncExchange
from hpctrain.train.model import EMA, misfits
from hpctrain.train.scores import Scores
from hpctrain.train.stateful import BestTest, GuardMemory
from hpctrain.train.step_meter import StepMeter
from hpctrain.train.sync_config import SYNCHRONOUS
from hpctrain.train.task import Task, seed_all


@dataclass(slots=True, kw_only=True)
class RunState:
    """The position of a run between two steps, and how to save and restore it."""

    task: Task
    step: int = 0  # steps that are done, of all epochs
    training_s: float = 0.0  # duration of the steps that were recorded, without tests
    scores: Scores | None = None  # of the last test
    owes_test: bool = False  # whether a stop has ended the test of the last epoch
    best: BestTest = field(default_factory=BestTest)  # of all tests
    num_records: int = 0  # lines of ``metrics.jsonl`` when the state was saved
    num_skipped: int = 0  # steps that were left out, as far as they were recorded
    checked_step: int = 0  # step after which replicas were compared last, in this part
    tally: StepMeter = field(default_factory=StepMeter)
    guard: GuardMemory = field(init=False)  # of losses, and of steps that were left out
    epoch_tally: StepMeter = field(default_factory=StepMeter)
    """Of the present epoch, where the method of ``[sync]`` is told its loss."""

    def __post_init__(self) -> None:
        self.guard = GuardMemory(self.task.config.train)

    @property
    def epochs_done(self) -> int:
        """Epochs whose steps are all done, and that were tested where that is due."""
        return self.task.train.epoch

    @property
    def has_lost_patience(self) -> bool:
        """Whether ``test.patience`` ends the run here."""
        return self.best.is_over(self.task.config.test.patience)

    @property
    def _parts(self) -> dict[str, Any]:
        """What has a state of its own, the same on every rank, by its name in a checkpoint."""
        precision, ema = self.task.precision, self.task.ema
        parts = {"precision": precision, "best": self.best, EMA: ema, "guard": self.guard}
        return {name: part for name, part in parts.items() if part is not None}

    def shared(self) -> dict[str, Any]:
        """Return what is the same on every rank. Collective.

        Buffers such as running means differ between ranks: here are those of rank 0, or their
        mean where replicas differ.
        """
        sync, method = self.task.sync, self.task.config.sync.method
        codec = codec_of(self.task)
        parallel = self.task.parallel
        replica = shared_replica(self.task) if parallel is None else parallel.state.state()
        parts = {name: part.state_dict() for name, part in self._parts.items()}
        if parts.get(EMA):  # as a whole model, for others to load
            parts[EMA] = {**replica["model"], **parts[EMA]}
        return {
            **replica,
            **parts,
            **({"tables": task.tables.state()} if (task := self.task).tables else {}),
            "sync": None if sync is None else {"method": method, **sync.shared_state()},
            "codec": codec.shared_state(self.task.comm) if codec else None,
            "layout": self.task.layout,
            "step": self.step,
            "epoch": self.epochs_done,
            "loader": self.task.train.state_dict(),
            "steps": None if self.task.steps is None else self.task.steps.state_dict(),
            "tally": self.tally.shared(self.task.comm),
            "epoch_tally": self.epoch_tally.shared(self.task.comm) if self.task.observer else None,
            "noise": mean_sums(self.task.noise, self.task.comm) if self.task.noise else None,
            "num_skipped": self.num_skipped,
            "training_s": self.training_s,
            "scores": None if self.scores is None else asdict(self.scores),
            "owes_test": self.owes_test,
            "num_records": self.num_records,
        }

    def own(self) -> dict[str, Any]:
        """Return what each rank has for itself. Collective."""
        sync = self.task.sync
        return {
            "replica": own_replica(self.task),
            "sync": None if sync is None else sync.own_state(),
            "codec": codec.state_dict() if (codec := codec_of(self.task)) else None,
            "random": random_states(self.task.device),
            "buffers": {name: b.detach() for name, b in self.task.model.named_buffers()},
            "tally": self.tally.state_dict(),
            "epoch_tally": self.epoch_tally.state_dict(),
            "noise": self.task.noise.sums.clone() if self.task.noise else None,
        }

    def restore(self, shared: Mapping[str, Any], own: Mapping[str, Any] | None) -> None:
        """Go on from what ``shared`` and ``own`` returned. Collective.

        ``own`` is None where the number of ranks has changed: then random numbers begin anew, and
        each rank has the buffers of rank 0, and the mean of the replicas. Raises
        ``CheckpointError``: the model, the optimizer or the local method does not fit the state.
        ``DataError``: the data set is another one.
        """
        task = self.task
        try:
            restore_replica(task, shared, own.get("replica") if own and task.sync else None)
        except (RuntimeError, ValueError) as error:
            raise CheckpointError(
                f"the checkpoint does not fit this model and optimizer: {error}; go on with the "
                f"configuration it was written with"
            ) from error
        if task.tables:
            task.tables.restore(shared.get("tables", {}))
        task.train.load_state_dict(shared["loader"])
        self.step, self.training_s = shared["step"], shared["training_s"]
        self.num_records = shared["num_records"]
        self.scores = Scores(**shared["scores"]) if shared["scores"] else None
        self.num_skipped = shared.get("num_skipped", 0)
        self.owes_test = shared.get("owes_test", False)
        for name, part in self._parts.items():
            if shared.get(name):  # else it begins anew: older checkpoints do not have them all
                part.load_state_dict(shared[name])
        if task.steps is not None and shared.get("steps"):
            task.steps.load_state_dict(shared["steps"])
        elif task.steps is not None:
            task.steps.next_step = self.step  # of a run that was not reproducible
        if task.sync is not None:
            method = task.config.sync.method
            restore_sync(task.sync, method, shared, own and own.get("sync"))
        self._restore_codec(shared, own)
        self._restore_noise(shared if own is None else own)
        self._restore_tallies(shared, own)
        if own is None:
            # Not the numbers of the first steps once more, and not the same on every rank.
            seed_all((task.config.seed + task.train.rank + (self.step << 20)) % 2**63)
            return
        with torch.no_grad():
            for name, buffer in task.model.named_buffers():
                buffer.copy_(own["buffers"][name])
        set_random_states(own["random"], task.device)

    def _restore_codec(self, shared: Mapping[str, Any], own: Mapping[str, Any] | None) -> None:
        """Go on with what was not sent yet, of this rank or shared out anew. Collective."""
        codec = codec_of(self.task)
        if codec is None:
            return
        if own is not None and own.get("codec") and codec.fits(own["codec"]):
            codec.load_state_dict(own["codec"])
        elif shared.get("codec"):
            codec.load_shared_state(shared["codec"], self.task.comm)

    def _restore_noise(self, state: Mapping[str, Any]) -> None:
        """Go on with what gradients have told this rank, or all of them; else begin anew."""
        if self.task.noise and state.get("noise") is not None:
            self.task.noise.sums = state["noise"].clone()

    def _restore_tallies(self, shared: Mapping[str, Any], own: Mapping[str, Any] | None) -> None:
        """Go on with sums of this rank, or of all; older checkpoints do not have them all."""
        for name, tally in (("tally", self.tally), ("epoch_tally", self.epoch_tally)):
            if own is not None and name in own:
                tally.load_state_dict(own[name])
            elif own is None and shared.get(name):
                tally.load_shared(shared[name], self.task.comm.rank)


def codec_of(task: Task) -> Codec | None:
    """Return what gradients travel by, where they do."""
    return getattr(task.optimizer, "codec", None)


def check_fit(have: Mapping[str, Tensor], want: Mapping[str, Tensor]) -> None:
    """Return if a checkpoint has all tensors of a model, in its shapes and types, and no others.

    Raises ``CheckpointError``: it has not; lists every tensor.
    """
    if lines := misfits(have, want):
        raise CheckpointError(
            f"the checkpoint of this run does not fit the model in {len(lines)} "
            f"tensor{'s' * (len(lines) != 1)}; build the model that was saved, or change its "
            f"state between hpctrain.checkpoint.load and save:\n  " + "\n  ".join(lines)
        )


def agree(task: Task) -> bool:
    """Say whether all ranks have one model and one optimizer state; the same on every rank."""
    sync = task.sync
    if sync is None or task.comm.size == 1:
        return True
    if isinstance(sync, AsyncExchange):
        return sync.agrees
    return sync.rounds.agrees and sync.facts.get("phase") == SYNCHRONOUS


def check_replicas(task: Task) -> bool:
    """Return whether all ranks should have one model now, after a look at it. Collective.

    Raises:
        ReplicaError: they have not; on every rank.
    """
    if task.sync is not None and not task.sync.rounds.agrees:
        return False
    if task.parallel is not None:
        task.parallel.check_replicas()
        return True
    optimizer = task.optimizer if agree(task) else None
    buffers = True if task.steps is not None else None
    heal = heals(task)
    require_equal_replicas(task.comm, task.model, optimizer, buffers=buffers, heal=heal)
    return True


def heals(task: Task) -> bool:
    """Say whether ranks that differ take the values of the others."""
    return task.config.train.on_divergence == "heal"


def shared_replica(task: Task) -> dict[str, Any]:
    """Return a model and an optimizer state that any number of ranks can begin with. Collective.

    Where ranks have their own, it is the mean of them. Buffers without a mean are those of rank 0.
    """
    sync = task.sync if isinstance(task.sync, LocalMethod) else None
    differ = sync is not None and task.comm.size > 1 and not sync.rounds.agrees
    with sync.replica.as_mean(sync.share()) if sync is not None and differ else nullcontext():
        model = dict(task.model.state_dict())
        for name, buffer in task.model.named_buffers():
            if name in model:
                copy = buffer.detach().to("cpu", copy=True)
                task.comm.broadcast_(copy).wait()
                model[name] = copy
        if differ:
            model = mapped(model, Tensor.clone)
    return {"model": model, "optimizer": shared_optimizer(task)}


def shared_optimizer(task: Task) -> dict[str, Any]:
    """Return an optimizer state that any number of ranks can begin with. Collective.

    The mean of all ranks' states; where some ranks have none of a parameter, as after a reset or
    before their first samples, the optimizer begins anew. So does that of an asynchronous method
    whose ranks have optimizers beside those of the servers.
    """
    state: dict[str, Any] = task.optimizer.state_dict()
    sync = task.sync
    if isinstance(sync, AsyncExchange) and sync.has_own_optimizer and task.comm.size > 1:
        return {**state, "state": {}}
    if not isinstance(task.sync, LocalMethod) or agree(task):
        return state
    names = state_hash({"names": [name for name, _ in task.sync.replica.state()]})
    if len(set(task.comm.allgather_object(names))) > 1:
        return {**state, "state": {}}
    return task.sync.replica.mean_state(task.sync.share())


def require_finite_weights(task: Task) -> None:
    """Return if the parameters of all ranks are finite, so that they may be kept. Collective.

    Raises:
        NotFiniteError: they are not; on every rank. Not with ``train.on_non_finite = "ignore"``.
    """
    if task.config.train.on_non_finite == "ignore":
        return
    names = ", ".join(unfinite_weights(task)[:3])
    found: Sequence[str | None] = task.comm.allgather_object(names or None)
    if any(found):
        raise NotFiniteError(
            f"parameters that are kept must be finite, {by_rank(found)} are not: nothing was "
            f"written\ntake a smaller optimizer.lr, or train.clip_norm (both with --changed)"
        )


def unfinite_weights(task: Task) -> list[str]:
    """Return the names of this rank's parameters that are not finite."""
    named = task.model.named_parameters()
    return [n for n, p in named if not bool(local(p.detach()).isfinite().all())]


def own_replica(task: Task) -> dict[str, Any] | None:
    """Return this rank's parameters and optimizer state; None where all ranks agree."""
    if agree(task):
        return None
    parameters = {name: p.detach() for name, p in task.model.named_parameters()}
    return {"parameters": parameters, "optimizer": task.optimizer.state_dict()}


@torch.no_grad()
def restore_replica(task: Task, shared: Mapping[str, Any], own: Mapping[str, Any] | None) -> None:
    """Give model and optimizer what ``shared_replica`` and ``own_replica`` returned.

    ``own`` is None where there is none, or the number of ranks has changed.
    """
    if task.parallel is not None:
        task.parallel.state.load(shared)
        return
    check_fit(shared["model"], task.model.state_dict())
    task.model.load_state_dict(shared["model"])
    # Copied: an optimizer keeps the tensors that it is given.
    saved = mapped((own or shared)["optimizer"], Tensor.clone)
    task.optimizer.load_state_dict(saved)
    # torch lets numbers, such as those of NAdam, have the type of the parameter: other bits.
    places = (place for group in saved["param_groups"] for place in group["params"])
    parameters = (p for group in task.optimizer.param_groups for p in group["params"])
    for place, parameter in zip(places, parameters, strict=True):
        state = task.optimizer.state.get(parameter, {})
        for name, value in saved["state"].get(place, {}).items():
            is_number = isinstance(value, Tensor) and value.dim() == 0 and name in state
            if is_number and state[name].dtype != value.dtype:
                state[name] = value.to(state[name].device)
    if own:
        for name, parameter in task.model.named_parameters():
            parameter.copy_(own["parameters"][name])


def mean_sums(noise: NoiseScale, comm: Communicator) -> Tensor:
    """Return the sums of a noise scale that all ranks have seen. Collective."""
    sums = noise.sums.clone()
    comm.allreduce_(sums, scale=1 / comm.size).wait()
    return sums


def restore_sync(
    sync: LocalMethod | AsyncExchange,
    method: str,
    shared: Mapping[str, Any],
    own: Mapping[str, Any] | None,
) -> None:
    """Let a local method go on, in a new round without ``own``. Collective, behind ``restore``."""
    state = shared.get("sync") or {}
    before = state.get("method", SYNCHRONOUS)
    if before != method:
        raise CheckpointError(
            f"a run goes on by the method that it has begun with, the checkpoint is of "
            f"sync.method = {before!r} and this run has {method!r}; set it back, or begin a run"
        )
    try:
        sync.load_shared_state(state)
        if own is not None:
            sync.load_own_state(own)
    except (KeyError, ValueError) as error:
        raise CheckpointError(
            f"the checkpoint does not fit [sync]: {error!r}; go on with the configuration it was "
            f"written with"
        ) from error


def random_states(device: torch.device) -> dict[str, Any]:
    """Return the states of all generators, as tensors and plain values."""
    is_cpu = device.type == "cpu"
    kind, keys, position, has_gauss, gauss = np.random.get_state(legacy=True)  # noqa: NPY002
    version, numbers, next_gauss = random.getstate()
    return {
        "torch": torch.get_rng_state(),
        "device": None if is_cpu else torch.get_device_module(device).get_rng_state(device),
        "numpy": {
            "kind": str(kind),
            "keys": torch.from_numpy(np.array(keys)),
            "position": int(position),
            "has_gauss": int(has_gauss),
            "gauss": float(gauss),
        },
        "python": {
            "version": version,
            "numbers": torch.tensor(numbers, dtype=torch.int64),
            "gauss": next_gauss,
        },
    }


def set_random_states(states: dict[str, Any], device: torch.device) -> None:
    """Let the generators go on from what ``random_states`` returned."""
    torch.set_rng_state(states["torch"].clone())
    # What was calculated elsewhere has no numbers for this device: it begins with those of a seed.
    if device.type != "cpu" and states.get("device") is not None:
        torch.get_device_module(device).set_rng_state(states["device"].clone(), device)
    of_numpy, of_python = states["numpy"], states["python"]
    keys: Tensor = of_numpy["keys"]
    np.random.set_state(  # noqa: NPY002 - a user's model may draw from it
        (
            of_numpy["kind"],
            keys.numpy(),
            of_numpy["position"],
            of_numpy["has_gauss"],
            of_numpy["gauss"],
        )
    )
    numbers = tuple(of_python["numbers"].tolist())
    random.setstate((of_python["version"], numbers, of_python["gauss"]))

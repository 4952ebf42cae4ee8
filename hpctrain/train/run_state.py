"""State of a run: all data on which the next step depends."""

import random
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field
from typing import Any

import numpy as np
import torch
from torch import Tensor

from hpctrain.core.errors import NotFiniteError
from hpctrain.core.units import by_rank
from hpctrain.parallel.dtensor import local
from hpctrain.train.model import EMA
from hpctrain.train.scores import Scores
from hpctrain.train.stateful import BestTest, GuardMemory
from hpctrain.train.step_meter import StepMeter
from hpctrain.train.task import Task, seed_all


@dataclass(slots=True, kw_only=True)
class RunState:
    """Position of a run between two steps, with methods to save and restore it."""

    task: Task
    step: int = 0  # number of finished steps, over all epochs
    training_s: float = 0.0  # total duration of the recorded steps, without tests
    scores: Scores | None = None  # results of the last test
    owes_test: bool = False  # whether a stop request interrupted the test of the last epoch
    best: BestTest = field(default_factory=BestTest)  # best of all tests
    num_records: int = 0  # lines of ``metrics.jsonl`` when the state was saved
    num_skipped: int = 0  # number of skipped steps, counted at each record
    checked_step: int = 0  # step of the last comparison of replicas since the start or resume
    tally: StepMeter = field(default_factory=StepMeter)  # sums since the last record
    guard: GuardMemory = field(init=False)  # loss statistics and skipped steps
    epoch_tally: StepMeter = field(default_factory=StepMeter)
    """Sums over the current epoch; empty unless the method of ``[sync]`` uses the epoch's loss."""

    def __post_init__(self) -> None:
        self.guard = GuardMemory(self.task.config.train)

    @property
    def epochs_done(self) -> int:
        """Number of finished epochs."""
        return self.task.train.epoch

    @property
    def has_lost_patience(self) -> bool:
        """Whether the last ``test.patience`` tests brought no improvement, which ends the run."""
        return self.best.is_over(self.task.config.test.patience)

    @property
    def _parts(self) -> dict[str, Any]:
        """Objects whose state is identical on all ranks, by their keys in a checkpoint."""
        precision, ema = self.task.precision, self.task.ema
        parts = {"precision": precision, "best": self.best, EMA: ema, "guard": self.guard}
        return {name: part for name, part in parts.items() if part is not None}

    def shared(self) -> dict[str, Any]:
        """Return the state that is identical on all ranks. Collective.

        Buffers such as running means differ between ranks; the state contains the buffers of
        rank 0. If replicas differ, the state contains the mean of the replicas.
        """
        exchange, comm = self.task.exchange, self.task.comm
        state = exchange.shared_state()
        parts = {name: part.state_dict() for name, part in self._parts.items()}
        if parts.get(EMA):  # a complete state dict, which other programs can load
            parts[EMA] = {**state["model"], **parts[EMA]}
        return {
            **state,
            **parts,
            "step": self.step,
            "epoch": self.epochs_done,
            "loader": self.task.train.state_dict(),
            "tally": self.tally.shared(comm),
            "epoch_tally": self.epoch_tally.shared(comm) if exchange.wants_epoch_loss else None,
            "num_skipped": self.num_skipped,
            "training_s": self.training_s,
            "scores": None if self.scores is None else asdict(self.scores),
            "owes_test": self.owes_test,
            "num_records": self.num_records,
        }

    def own(self) -> dict[str, Any]:
        """Return the state that only this rank has, such as random generators. Collective."""
        return {
            **self.task.exchange.own_state(),
            "random": random_states(self.task.device),
            "buffers": {name: b.detach() for name, b in self.task.model.named_buffers()},
            "tally": self.tally.state_dict(),
            "epoch_tally": self.epoch_tally.state_dict(),
        }

    def restore(self, shared: Mapping[str, Any], own: Mapping[str, Any] | None) -> None:
        """Continue from a saved state. Collective.

        Args:
            shared: result of ``shared()``.
            own: result of ``own()`` on this rank; None if the number of ranks has changed. If
                None, random generators are seeded again, and each rank gets the buffers and
                parameters of ``shared``.

        Raises:
            CheckpointError: the model, the optimizer or the local method does not match the state.
            DataError: the data set has changed.
        """
        task = self.task
        task.exchange.restore(shared, own)
        task.train.load_state_dict(shared["loader"])
        self.step, self.training_s = shared["step"], shared["training_s"]
        self.num_records = shared["num_records"]
        self.scores = Scores(**shared["scores"]) if shared["scores"] else None
        self.num_skipped = shared.get("num_skipped", 0)
        self.owes_test = shared.get("owes_test", False)
        for name, part in self._parts.items():
            if shared.get(name):  # older checkpoints lack some of these keys
                part.load_state_dict(shared[name])
        self._restore_tallies(shared, own)
        if own is None:
            # The seed must differ between ranks, and from the seed at step 0.
            seed_all((task.config.seed + task.train.rank + (self.step << 20)) % 2**63)
            return
        with torch.no_grad():
            for name, buffer in task.model.named_buffers():
                buffer.copy_(own["buffers"][name])
        set_random_states(own["random"], task.device)

    def _restore_tallies(self, shared: Mapping[str, Any], own: Mapping[str, Any] | None) -> None:
        """Restore the sums since the last record and the sums of the current epoch, if saved."""
        for name, tally in (("tally", self.tally), ("epoch_tally", self.epoch_tally)):
            if own is not None and name in own:
                tally.load_state_dict(own[name])
            elif own is None and shared.get(name):
                tally.load_shared(shared[name], self.task.comm.rank)


def require_finite_weights(task: Task) -> None:
    """Check that the parameters of all ranks are finite. Collective.

    No-op with ``train.on_non_finite = "ignore"``.

    Raises:
        NotFiniteError: a parameter is not finite; on all ranks.
    """
    if task.config.train.on_non_finite == "ignore":
        return
    names = ", ".join(unfinite_weights(task)[:3])
    found: Sequence[str | None] = task.comm.allgather_object(names or None)
    if any(found):
        raise NotFiniteError(
            f"saved parameters must be finite, but {by_rank(found)} are not; nothing was "
            f"written\nuse a smaller optimizer.lr, or train.clip_norm (both with --changed)"
        )


def unfinite_weights(task: Task) -> list[str]:
    """Return the names of this rank's parameters that are not finite."""
    named = task.model.named_parameters()
    return [n for n, p in named if not bool(local(p.detach()).isfinite().all())]


def random_states(device: torch.device) -> dict[str, Any]:
    """Return the states of the random generators of torch, NumPy and Python.

    All states are tensors and numbers, for a checkpoint.
    """
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
    """Restore all random generators from a result of ``random_states()``."""
    torch.set_rng_state(states["torch"].clone())
    # A checkpoint of a CPU run has no state of a device; the device then keeps its seed.
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

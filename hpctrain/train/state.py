"""How far a run is: all that makes its next step what it would have been without a stop."""

from collections.abc import Mapping
from dataclasses import asdict, dataclass, field
from typing import Any

import torch
from torch import Tensor

from hpctrain.checkpoint.fit import check_fit
from hpctrain.checkpoint.stateful import Stateful
from hpctrain.comm.communicator import Communicator
from hpctrain.errors import CheckpointError
from hpctrain.train.evaluate import Scores
from hpctrain.train.random_states import random_states, seed_all, set_random_states
from hpctrain.train.tally import Tally
from hpctrain.train.task import Task


@dataclass(slots=True, kw_only=True)
class RunState:
    """The position of a run between two steps, and how to save and restore it."""

    task: Task
    step: int = 0
    """Steps that are done, of all epochs."""
    training_s: float = 0.0
    """Duration of the steps that were recorded, without tests."""
    scores: Scores | None = None
    """Of the last test."""
    num_records: int = 0
    """Lines of ``metrics.jsonl`` when the state was saved."""
    tally: Tally = field(default_factory=Tally)
    _registered: dict[str, Stateful] = field(default_factory=dict)

    @property
    def epochs_done(self) -> int:
        """Epochs whose steps are all done, and that were tested where that is due."""
        return self.task.train.epoch

    def register(self, name: str, part: Stateful) -> None:
        """Let checkpoints hold the state of ``part`` too, each rank its own."""
        assert name not in self._registered, name
        self._registered[name] = part

    def shared(self, comm: Communicator) -> dict[str, Any]:
        """Return what is the same on every rank. Collective.

        Buffers such as running means differ between ranks: here are those of rank 0.
        """
        model = dict(self.task.model.state_dict())
        for name, buffer in self.task.model.named_buffers():
            if name in model:
                copy = buffer.detach().clone()
                comm.broadcast_(copy).wait()
                model[name] = copy
        return {
            "model": model,
            "optimizer": self.task.optimizer.state_dict(),
            "step": self.step,
            "epoch": self.epochs_done,
            "loader": self.task.train.state_dict(),
            "steps": None if self.task.steps is None else self.task.steps.state_dict(),
            "tally": self.tally.shared(comm),
            "training_s": self.training_s,
            "scores": None if self.scores is None else asdict(self.scores),
            "num_records": self.num_records,
        }

    def own(self) -> dict[str, Any]:
        """Return what each rank has for itself."""
        return {
            "random": random_states(),
            "buffers": {name: buffer.detach() for name, buffer in self._buffers().items()},
            "tally": self.tally.state_dict(),
            "registered": {name: part.state_dict() for name, part in self._registered.items()},
        }

    def restore(self, shared: Mapping[str, Any], own: Mapping[str, Any] | None) -> None:
        """Go on from a state.

        Args:
            shared: what ``shared`` returned.
            own: what ``own`` returned on this rank; None where the number of ranks has changed:
                then random numbers begin anew, and each rank has the buffers of rank 0.

        Raises:
            CheckpointError: the model or the optimizer does not fit the state.
            DataError: the data set is another one.
        """
        task = self.task
        check_fit(shared["model"], task.model.state_dict(), "the checkpoint of this run")
        try:
            task.model.load_state_dict(shared["model"])
            task.optimizer.load_state_dict(_copied(shared["optimizer"]))
        except (RuntimeError, ValueError) as error:
            raise CheckpointError(
                f"the checkpoint does not fit this model and optimizer: {error}; go on with the "
                f"configuration it was written with"
            ) from error
        task.train.load_state_dict(shared["loader"])
        self.step, self.training_s = shared["step"], shared["training_s"]
        self.num_records = shared["num_records"]
        self.scores = Scores(**shared["scores"]) if shared["scores"] else None
        if task.steps is not None and shared.get("steps"):
            task.steps.load_state_dict(shared["steps"])
        elif task.steps is not None:
            task.steps.next_step = self.step  # of a run that was not reproducible
        if own is None:
            # Not the numbers of the first steps once more, and not the same on every rank.
            seed_all((task.config.seed + task.train.rank + (self.step << 20)) % 2**63)
            if "tally" in shared:
                self.tally.load_shared(shared["tally"], task.train.rank)
            return
        with torch.no_grad():
            for name, buffer in self._buffers().items():
                buffer.copy_(own["buffers"][name])
        self.tally.load_state_dict(own["tally"])
        for name, part in self._registered.items():
            part.load_state_dict(own["registered"][name])
        set_random_states(own["random"])

    def _buffers(self) -> dict[str, Tensor]:
        return dict(self.task.model.named_buffers())


def _copied(tree: Any) -> Any:
    """Copy the tensors of a tree: an optimizer keeps those that it is given."""
    match tree:
        case Tensor():
            return tree.clone()
        case dict():
            return {name: _copied(item) for name, item in tree.items()}
        case list() | tuple():
            return type(tree)(_copied(item) for item in tree)
    return tree

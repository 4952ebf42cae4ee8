"""A training of about two seconds on any machine: steps of a tiny model, each with a pause.

The run reads shards, saves checkpoints and writes metrics. The weights depend on random numbers
of every kind, so two runs are equal only if a resume loses no state.
"""

import time
from pathlib import Path

from torch import Tensor, nn

from tests.train import problem

EPOCHS, STEPS_PER_EPOCH = 10, 4
STEPS = EPOCHS * STEPS_PER_EPOCH

CONFIG = """\
name = "tiny"
output_dir = "{folder}/run"

[model]
target = "tests.slurm.training:model"

[data]
target = "tests.train.problem:data"
args = {{ folder = "{folder}/data" }}

[optimizer]
name = "SGD"
lr = 0.05
args = {{ momentum = 0.9 }}

[train]
epochs = {epochs}
global_batch = 16

[checkpoint]
every = 4
resume = "auto"

[log]
every_steps = 1
plots = false
"""


class Pause(nn.Module):
    """A layer that sleeps in training mode."""

    def __init__(self, seconds: float) -> None:
        super().__init__()
        self.seconds = seconds

    def forward(self, x: Tensor) -> Tensor:
        if self.training:
            time.sleep(self.seconds)
        return x


def model(step_s: float = 0.05) -> nn.Sequential:
    """Return a network whose step takes ``step_s`` seconds and draws random numbers."""
    return nn.Sequential(Pause(step_s), problem.Noise(), *problem.model(dropout=0.3))


def write(folder: Path, *, epochs: int = EPOCHS) -> Path:
    """Write ``tiny.toml``; the run directory and the data are in the same folder."""
    path = folder / "tiny.toml"
    path.write_text(CONFIG.format(folder=folder, epochs=epochs))
    return path

"""Model and data of volumes.toml: a 3D network estimates parameters of synthetic volumes.

The task resembles CosmoFlow of MLPerf HPC: the input is the number of particles in each cell of a
cube at four times (channels), the output four parameters. Here the cubes are small and synthetic:
three parameters define the power spectrum of a Gaussian random field, the fourth its growth rate.
The density of particles is the exponential of the field.
"""

from pathlib import Path

import numpy as np
from numpy.typing import NDArray
from torch import Tensor, nn

from hpctrain.comm import Communicator
from hpctrain.data import MANIFEST, ShardedDataset, ShardWriter

CELLS = 16
"""Number of cells along each side of a cube."""
NUM_TIMES = 4
PARTICLES_PER_CELL = 20
"""Average number."""
FIELDS = {
    "counts": ((NUM_TIMES, CELLS, CELLS, CELLS), np.uint16),
    "parameters": ((4,), np.float32),
}
SAMPLES_PER_SHARD = 512
SAMPLES_PER_APPEND = 64


class Network(nn.Module):
    """Three convolutions, their mean over the cube, then two linear layers."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.layers = nn.Sequential(
            nn.Conv3d(NUM_TIMES, width, 3),
            nn.LeakyReLU(0.1),
            nn.AvgPool3d(2),
            nn.Conv3d(width, 2 * width, 3),
            nn.LeakyReLU(0.1),
            nn.Conv3d(2 * width, 4 * width, 3),
            nn.LeakyReLU(0.1),
            nn.AdaptiveAvgPool3d(1),
            nn.Flatten(),
            nn.Linear(4 * width, 64),
            nn.LeakyReLU(0.1),
            nn.Linear(64, 4),
        )

    def forward(self, counts: Tensor) -> Tensor:
        """Turn ``(n, 4, CELLS, CELLS, CELLS)`` counts into ``(n, 4)`` estimates."""
        estimates: Tensor = self.layers((counts.float() / PARTICLES_PER_CELL + 0.05).log())
        return estimates


def model(width: int = 8) -> Network:
    """Make the network; ``width`` counts the channels of its first layer."""
    return Network(width)


def absolute_error(estimates: Tensor, parameters: Tensor) -> Tensor:
    """Mean over the four parameters, ``(n,)``; 0.5 for one who always says 0."""
    return (estimates - parameters).abs().mean(dim=1)


def data(
    comm: Communicator, folder: str, num_train: int, num_validation: int, num_test: int
) -> tuple[ShardedDataset, ...]:
    """Return cubes for training, validation and test, which all ranks make in the first run.

    Collective. The cubes do not depend on the number of ranks.

    Args:
        comm: all ranks.
        folder: folder of the three data sets.
        num_train: number of training cubes.
        num_validation: number of cubes for the tests during training.
        num_test: number of cubes for the test at the end.
    """
    root = Path(folder)
    sizes, begin = {"train": num_train, "validation": num_validation, "test": num_test}, 0
    for split, num in sizes.items():
        if not comm.broadcast_object((root / split / MANIFEST).exists()):
            _write(root / split, split, range(begin, begin + num), comm)
        begin += num
    return tuple(ShardedDataset.open(root / split, comm) for split in sizes)


def _write(directory: Path, split: str, numbers: range, comm: Communicator) -> None:
    """Write cubes; each rank writes its part of the numbers to separate shards."""
    start, stop = (len(numbers) * rank // comm.size for rank in (comm.rank, comm.rank + 1))
    mine = numbers[start:stop]
    with ShardWriter(
        directory, FIELDS, samples_per_shard=SAMPLES_PER_SHARD, split=split, comm=comm
    ) as writer:
        for first in range(0, len(mine), SAMPLES_PER_APPEND):
            made = [cube(number) for number in mine[first : first + SAMPLES_PER_APPEND]]
            counts, parameters = (np.stack(each) for each in zip(*made, strict=True))
            writer.append({"counts": counts, "parameters": parameters})


def cube(number: int) -> tuple[NDArray[np.uint16], NDArray[np.float32]]:
    """Make a sample: counts ``(4, CELLS, CELLS, CELLS)`` and four parameters in [-1, 1]."""
    rng = np.random.default_rng([2026, number])
    parameters = rng.uniform(-1, 1, 4)
    strength = 0.5 * 2 ** (0.5 * parameters[0])  # standard deviation of the field, now
    slope = -1.5 + 1.5 * parameters[1]  # of its power spectrum
    end = 4 * 2 ** (0.6 * parameters[2])  # wave number at which the spectrum falls off
    growth = 0.75 + 0.2 * parameters[3]  # from now to each time before

    wave = _wave_numbers()
    amplitude = np.sqrt(wave**slope * np.exp(-((wave / end) ** 2)))
    amplitude[0, 0, 0] = 0
    noise = np.fft.fftn(rng.standard_normal((CELLS, CELLS, CELLS)))
    field = np.fft.ifftn(noise * amplitude).real * (strength / np.sqrt(np.mean(amplitude**2)))
    fields = np.stack([field * growth**time for time in range(NUM_TIMES)])
    spread = fields.var(axis=(1, 2, 3), keepdims=True)
    counts = rng.poisson(PARTICLES_PER_CELL * np.exp(fields - spread / 2))
    most = np.iinfo(np.uint16).max
    return np.minimum(counts, most).astype(np.uint16), parameters.astype(np.float32)


def _wave_numbers() -> NDArray[np.float64]:
    """Length of the wave vector of each Fourier mode; 1 for the mean, which has none."""
    along = np.fft.fftfreq(CELLS, 1 / CELLS)
    wave: NDArray[np.float64] = np.sqrt(
        sum(axis**2 for axis in np.meshgrid(along, along, along, indexing="ij"))
    )
    wave[0, 0, 0] = 1
    return wave

"""Check that checkpoints of every version of the format are still loaded.

Two ranks wrote ``golden/v1``, ``golden/v2`` and ``golden/v3`` with these versions of the format,
from ``golden_state`` and ``golden_private`` below, each rank to its own file in versions 1 and 3,
and to one file in version 2; the files must not be rewritten.
"""

import hashlib
from pathlib import Path

import pytest
import torch

from hpctrain.checkpoint.format.manifest import VERSION, CheckpointManifest
from hpctrain.checkpoint.format.shard import Shard, TensorPiece
from hpctrain.checkpoint.format.tensor_file import DTYPES
from hpctrain.checkpoint.loading import check, load
from hpctrain.comm.mpi import MpiCommunicator
from tests.checkpoint.states import PLAIN, same

GOLDEN = Path(__file__).parent / "golden"
FACTS = {"name": "golden", "world": 2, "seeds": [1, 2.5, None, {"a": True}]}
NAMES = (
    "bfloat16 complex128 complex64 float16 float32 float64 float8_e4m3fn float8_e4m3fnuz "
    "float8_e5m2 float8_e5m2fnuz float8_e8m0fnu int16 int32 int64 int8 uint16 uint32 uint64 uint8"
)
COLUMNS = torch.arange(30, dtype=torch.float64).reshape(5, 6) / 7


def golden_state(rank=None):
    """Return the state; with ``rank``, the piece that this rank saved."""
    bits = torch.arange(96, dtype=torch.uint8).reshape(2, 3, 16)
    tensors = {name: bits.clone().view(DTYPES[name]) for name in NAMES.split()}
    piece = Shard((5, 6), (0, 4 * (rank or 0)), (5, 2 if rank else 4))
    return {
        "plain": PLAIN,
        "dtypes": {**tensors, "bool": bits % 3 == 0},
        "shapes": [torch.tensor(2.5), torch.zeros(0, 3), torch.ones(1)],
        "model": {"0.weight": torch.arange(6.0).reshape(2, 3), 0: torch.arange(3)},
        "columns": COLUMNS
        if rank is None
        else TensorPiece(COLUMNS[Shard.whole((5, 6)).slices(piece)], piece),
    }


def golden_private(rank):
    return {"random": torch.arange(10, dtype=torch.uint8) + rank, "rank": rank}


FILES = {
    "v1": {
        "manifest.json": "f5cda71df2529752",
        "rank-00000.safetensors": "132b88438ad79272",
        "rank-00001.safetensors": "afabfc8e20897854",
    },
    "v2": {"manifest.json": "6818eca41e5ffa08", "rank-00000.safetensors": "b8e5d007983aaf82"},
    "v3": {
        "manifest.json": "961eb1dbec7c3920",
        "rank-00000.safetensors": "508e634b78f4ab68",
        "rank-00001.safetensors": "5441aa5cf0e8e3e3",
    },
}


def test_golden_checkpoint_has_the_current_version():
    assert f"v{VERSION}" == max(FILES)


@pytest.mark.parametrize("version", FILES)
def test_golden_checkpoint_is_unchanged(version):
    files = sorted((GOLDEN / version).iterdir())
    digests = [hashlib.sha256(file.read_bytes()).hexdigest()[:16] for file in files]
    assert dict(zip([file.name for file in files], digests, strict=True)) == FILES[version]
    manifest = CheckpointManifest.read(GOLDEN / version)
    assert (manifest.step, manifest.world, manifest.facts) == (1200, 2, FACTS)


@pytest.mark.requires("torch-2.7")
@pytest.mark.ranks(1, 2, 3)
@pytest.mark.parametrize("version", FILES)
def test_golden_checkpoint_is_loaded_bitwise(world, version):
    comm = MpiCommunicator(world)
    loaded = load(GOLDEN / version, comm)
    assert same(loaded.state, golden_state())
    assert all(same(loaded.private[rank], golden_private(rank)) for rank in range(2))
    assert (loaded.step, loaded.facts) == (1200, FACTS)
    shard = Shard((5, 6), (1, 3), (3, 2))
    piece = load(GOLDEN / version, comm, into={"columns": shard}).state["columns"]
    assert same(piece, TensorPiece(COLUMNS[1:4, 3:5].clone(), shard))
    assert check(GOLDEN / version) == []
    comm.close()

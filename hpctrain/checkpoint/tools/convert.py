"""Read states that other programs wrote, and make checkpoints of them. No code of them is run."""

import json
import pickle
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch

from hpctrain.checkpoint.format import manifest
from hpctrain.checkpoint.format.state_tree import unflatten
from hpctrain.checkpoint.saving import Saved, save
from hpctrain.checkpoint.tools.export import SKELETON
from hpctrain.comm.agreement import agreed
from hpctrain.core.atomic import reason_of
from hpctrain.core.errors import CheckpointError

if TYPE_CHECKING:
    from hpctrain.comm.communicator import Communicator


def read_foreign(source: Path | str) -> dict[str, Any]:
    """Return the state that a file of torch or safetensors holds, with all tensors on the CPU.

    Args:
        source: ``*.safetensors``, or any other file for ``torch.load``.

    Raises:
        CheckpointError: there is none, it is damaged, or it holds more than tensors and plain
            values in a dict.
    """
    source = Path(source)
    if (source / manifest.NAME).exists():
        raise CheckpointError(f"{source} is a checkpoint of hpctrain itself; load it as one")
    if source.is_dir():
        raise CheckpointError(
            f"a state is read from one file, {source} is a directory; one of "
            f"torch.distributed.checkpoint becomes a file by python -m "
            f"torch.distributed.checkpoint.format_utils dcp_to_torch {source} OUT.pt, which runs "
            f"what its index says: do so only where you trust who wrote it"
        )
    if source.suffix == ".safetensors":
        return _read_safetensors(source)
    return _read_torch(source)


def import_state(
    source: Path | str,
    directory: Path | str,
    comm: "Communicator",
    *,
    under: str | None = None,
    step: int = 0,
    facts: Mapping[str, Any] | None = None,
) -> Saved:
    """Make a checkpoint of what another program wrote.

    Collective. Every rank reads ``source``, which all must see, and writes its share.

    Args:
        source: as ``read_foreign`` takes it.
        directory: of the new checkpoint, such as ``RUN/checkpoints/step-00000000``.
        comm: ranks that write.
        under: name in the new state, such as ``model`` for the weights of a model; without it,
            ``source`` is the whole state.
        step: at which the run goes on.
        facts: what is told of the checkpoint.

    Raises:
        CheckpointError: ``source`` cannot be read on some rank, or the checkpoint not written.
    """
    with agreed(comm, CheckpointError):
        state = read_foreign(source)
    told = {"imported_from": str(source), **(facts or {})}
    state = {under: state} if under else state
    return save(Path(directory), state, comm, step=step, facts=told)


def _read_torch(source: Path) -> dict[str, Any]:
    try:
        state: object = torch.load(source, map_location="cpu", weights_only=True)
    except FileNotFoundError:
        raise CheckpointError(f"there is no {source}; check the path") from None
    except pickle.UnpicklingError as error:
        raise CheckpointError(
            f"{source} is damaged, or holds more than tensors and plain values: "
            f"{str(error).splitlines()[0]}; use another one"
        ) from error
    except (OSError, RuntimeError, EOFError, ValueError) as error:
        raise CheckpointError(f"cannot read {source}: {error}; use another one") from error
    if not isinstance(state, Mapping):
        raise CheckpointError(
            f"a state is a dict of tensors and values, {source} holds a {type(state).__name__}; "
            f"save a state_dict()"
        )
    return {name: _numbered(value) for name, value in _numbered(state).items()}


def _numbered(state: Any) -> Any:
    """Return the state of an optimizer with numbers of parameters, which dcp_to_torch makes text.

    ``load_state_dict`` would take text for the names of no parameters, without a word.
    """
    if not isinstance(state, Mapping) or not {"state", "param_groups"} <= {*state}:
        return state
    numbered = {
        int(key) if isinstance(key, str) and key.isdecimal() else key: value
        for key, value in state["state"].items()
    }
    return {**state, "state": numbered}


def _read_safetensors(source: Path) -> dict[str, Any]:
    from safetensors import SafetensorError, safe_open  # noqa: PLC0415

    try:
        with safe_open(source, framework="pt") as file:
            header = file.metadata() or {}
            tensors = {name: file.get_tensor(name) for name in file.keys()}  # noqa: SIM118
        if SKELETON not in header:
            return tensors
        state = unflatten(json.loads(header[SKELETON]), tensors.__getitem__)
    except FileNotFoundError:
        raise CheckpointError(f"there is no {source}; check the path") from None
    except (
        CheckpointError, SafetensorError, OSError, ValueError, KeyError, RecursionError,
    ) as error:  # fmt: skip
        raise CheckpointError(
            f"{source} is damaged or no file of safetensors: {reason_of(error)}; use another one"
        ) from error
    if not isinstance(state, dict):
        raise CheckpointError(f"a state is a dict, {source} holds another value; use another one")
    return state

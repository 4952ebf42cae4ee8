"""Checks that the tensor parallel ranks run the same forward on the same samples."""

import zlib
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.nn.functional import scaled_dot_product_attention, softmax
from torch.overrides import TorchFunctionMode

from hpctrain.comm.tensor_arguments import host_bytes
from hpctrain.core.errors import ConfigError
from hpctrain.parallel.mesh_agreement import digest, require_identical

MIXING = (
    *(nn.RNNBase, nn.Conv1d, nn.Conv2d, nn.Conv3d, nn.GroupNorm, nn.MultiheadAttention),
    *(nn.BatchNorm1d, nn.BatchNorm2d, nn.BatchNorm3d, nn.InstanceNorm1d),
)
"""Layers that combine several positions of a sequence."""
SOFTMAX = (softmax, torch.softmax, Tensor.softmax)


def require_divided_stream(model: nn.Module, found: Mapping[str, tuple[nn.Module, str]]) -> None:
    """Raise ``ConfigError`` unless activations can be divided along the sequence.

    Args:
        model: model before its matrices are divided.
        found: module and role by module name.
    """
    for name, module in model.named_modules():
        if isinstance(module, nn.Embedding) and name not in found:
            raise ConfigError(
                f"an embedding must have the role vocabulary with sequence=True, but {name} has "
                "no role; assign the role, or omit sequence"
            )
        if isinstance(module, MIXING):
            raise ConfigError(
                f"layers without a role must process each position alone with "
                f"sequence=True, but {name}, a {type(module).__name__}, combines "
                f"positions; omit sequence, or replace the layer"
            )
    if not any(isinstance(module, nn.Embedding) for module, _ in found.values()):
        raise ConfigError(
            "an embedding must have the role vocabulary with sequence=True, but no embedding of "
            "the model has a role; assign it to the embedding of tokens, or omit sequence"
        )


class CheckedSamples:
    """Checks the inputs of an embedding: equal samples on all ranks, valid tokens, valid length.

    Args:
        mesh: tensor parallel ranks.
        name: name of the embedding, for messages.
        rows: number of rows of the embedding.
        sequence: whether activations are divided along the sequence.
    """

    def __init__(self, mesh: DeviceMesh, name: str, rows: int, *, sequence: bool) -> None:
        self._mesh, self._parts = mesh, mesh.size() if sequence else 1
        self._name, self._rows = name, rows
        self._is_first = True

    def check(self, _: nn.Module, inputs: tuple[Tensor, ...]) -> None:
        """Check the input before forward; raise on all ranks or none."""
        given, is_first = inputs[0], self._is_first
        if self._is_first:  # a program divides data in the same manner in later steps
            self._is_first = False
            remedy = "divide data among the ranks of dp only"
            what = "a batch of tensor parallel ranks"
            require_identical(self._mesh, [digest(given)], what, remedy)
        # Reading a result waits for the device, so on a GPU only the first input is checked.
        if given.numel() and (is_first or given.device.type == "cpu"):
            least, most = (int(each) for each in given.aminmax())
            if least < 0 or most >= self._rows:
                raise ConfigError(
                    f"tokens of the embedding {self._name} must be from 0 to "
                    f"{self._rows - 1}, got {least if least < 0 else most}; use a larger "
                    f"vocabulary"
                )
        if self._parts > 1 and (given.dim() < 2 or given.shape[1] % self._parts):
            raise ConfigError(
                f"the length of samples must be a multiple of the {self._parts} sequence "
                f"parallel ranks, got {given.shape[-1]}; pad the samples, or omit sequence"
            )


class ForwardChecks:
    """Checks random generators and attention in calls of a model or of its layers.

    In calls 1, 2, 4, 8 and so on of a module that draws random numbers, the ranks compare the
    states of their random generators. With several ``parts``, attention that gets only one part of
    the sequence raises an error.

    Args:
        mesh: tensor parallel ranks.
        parts: number of parts of the sequence.
    """

    def __init__(self, mesh: DeviceMesh, parts: int) -> None:
        self._mesh, self._device_type, self._parts = mesh, mesh.device_type, parts
        self._outer: nn.Module | None = None
        self._calls: dict[nn.Module, int] = {}
        self._before = b""
        self._mode: _WholeAttention | None = None

    def watch(self, model: nn.Module) -> None:
        """Add hooks that check each outermost call of a module of the model."""
        for module in model.modules():
            module.register_forward_pre_hook(self._enter)
            module.register_forward_hook(self._leave, always_call=True)

    def _enter(self, module: nn.Module, inputs: tuple[Any, ...]) -> None:
        if self._outer is not None:
            return
        self._outer = module
        if self._parts == 1:
            self._before = _state(self._device_type)
        elif module not in self._calls and inputs and isinstance(inputs[0], Tensor):
            self._calls[module] = 1
            given = inputs[0]
            if given.dim() > 1:
                parts = 1 if given.is_floating_point() else self._parts
                self._mode = _WholeAttention(given.shape[1] // parts, self._parts)
                self._mode.__enter__()  # type: ignore[no-untyped-call]

    def _leave(self, module: nn.Module, _: object, output: object) -> None:
        if self._outer is not module:
            return
        self._outer = None
        if self._mode is not None:
            self._mode.__exit__(None, None, None)  # type: ignore[no-untyped-call]
            self._mode = None
        if self._parts > 1 or output is None or self._before == _state(self._device_type):
            return
        self._calls[module] = calls = self._calls.get(module, 0) + 1
        if calls & (calls - 1) == 0:
            require_identical(
                self._mesh,
                [f"crc32 {zlib.crc32(self._before):08x} of their state"],
                "the random numbers of tensor parallel ranks, such as those of dropout",
                "call torch.manual_seed() with the same number on all ranks of tp, and "
                "draw random numbers on all of them",
            )


class _WholeAttention(TorchFunctionMode):
    """Raises an error if attention receives only one part of the sequence."""

    def __init__(self, length: int, parts: int) -> None:
        super().__init__()
        self._length, self._parts = length, parts

    def __torch_function__(
        self,
        func: Callable[..., Any],
        types: Sequence[Any],
        args: tuple[Any, ...] = (),
        kwargs: dict[str, Any] | None = None,
    ) -> Any:
        options = kwargs or {}
        if func is scaled_dot_product_attention:
            key = args[1] if len(args) > 1 else options["key"]
            self._check(key.shape[-2])
        if func in SOFTMAX and args and args[0].dim() > 3 and args[0].shape[-2] == self._length:
            self._check(args[0].shape[-1])
        return func(*args, **options)

    def _check(self, length: int) -> None:
        if length == self._length:
            raise ConfigError(
                f"with sequence=True, attention must be between modules with the roles column "
                f"and row, which get the whole sequence, but attention gets {length} positions, "
                f"1 of {self._parts} parts; assign column and row to the matrices of attention, "
                f"or omit sequence"
            )


def _state(device_type: str) -> bytes:
    """Return the states of the random generators of the CPU and of the device."""
    if device_type == "cpu":
        return bytes(host_bytes(torch.get_rng_state()))
    state: Tensor = torch.get_device_module(device_type).get_rng_state()
    return b"".join(map(host_bytes, (torch.get_rng_state(), state)))

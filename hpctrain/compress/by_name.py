"""Codecs by name, and creation of a codec from the argument ``compression``."""

import copy
import warnings
from collections.abc import Callable, Mapping
from functools import partial
from typing import Any, cast

import torch
from torch.optim import Optimizer

from hpctrain.compress.codec import Codec, Compressor, Identity, TensorByTensor
from hpctrain.compress.half import Compression, Half, HalfCodec, NoCompression
from hpctrain.core.errors import ConfigError
from hpctrain.core.lazy import imported
from hpctrain.core.target import check_arguments

CODECS: Mapping[str, str | Callable[..., Codec]] = {
    "none": Identity,
    "auto": "auto:Auto",
    "fp16": partial(HalfCodec, torch.float16),
    "bf16": partial(HalfCodec, torch.bfloat16),
    "int8": "int8:Int8",
    "qsgd": "qsgd:QSGD",
    "sign": "sign:SignSGD",
    "one_bit": "sign:OneBit",
    "top_k": "largest:TopK",
    "dgc": "largest:DeepGradientCompression",
    "power_sgd": "power_sgd:PowerSGD",
}
"""Classes by name; a module is imported when its codec is used."""

Compressing = Compressor | Codec | str
"""Types of the argument ``compression``."""


def codec_named(name: str, args: Mapping[str, Any], key: str) -> Codec:
    """Create the codec ``name`` with arguments ``args``.

    Args:
        name: name in ``CODECS``.
        args: keyword arguments of the class.
        key: key of ``args`` in the configuration, for error messages.

    Raises:
        ConfigError: the class does not accept the arguments.
    """
    make = _maker(name)
    check_arguments(make, 0, args, key)
    try:
        return make(**args)
    except (TypeError, ValueError) as error:  # a ConfigError is a ValueError
        raise ConfigError(f"{key} of {name}: {error}") from error


def _maker(name: str) -> Callable[..., Codec]:
    found = CODECS[name]
    if not isinstance(found, str):
        return found
    made: Callable[..., Codec] = imported(f"hpctrain.compress.{found}")
    return made


def codec_for(compression: Compressing | None, optimizer: Optimizer | None = None) -> Codec:
    """Create a codec from a Horovod compressor, a codec, or the name of a codec.

    Warns if training with ``optimizer`` and the codec may not converge.

    Raises:
        ConfigError: ``compression`` has another type, or is not the name of a codec.
    """
    codec = _made(compression)
    if optimizer is not None and (warning := codec.warning(optimizer)):
        warnings.warn(f"compression by {type(codec).__name__}: {warning}", stacklevel=3)
    return codec


def _made(compression: Compressing | None) -> Codec:
    if compression is None or isinstance(compression, NoCompression):
        return Identity()
    if isinstance(compression, str):
        if compression not in CODECS:
            raise ConfigError(
                f"compression must be one of {', '.join(CODECS)}, or a codec of "
                f"hpctrain.compress, got {compression!r}"
            )
        return _maker(compression)()
    if hasattr(compression, "allreduce_") and not isinstance(compression, type):
        return copy.deepcopy(cast("Codec", compression))  # each optimizer has separate state
    if isinstance(compression, Half):
        return HalfCodec(compression.dtype)
    if not hasattr(compression, "compress"):
        raise ConfigError(
            f"compression must be a codec such as Int8(), the name of a codec, or an object with "
            f"methods compress and decompress, got {compression!r}"
        )
    made: Any = compression
    return TensorByTensor(made)


def compressor_for(compression: Compressing | None) -> Compressor:
    """Return the compressor for Adasum, which sends single tensors and cannot use a codec.

    Raises:
        ConfigError: ``compression`` is a codec.
    """
    made = Compression.none if compression is None else compression
    if isinstance(made, str):
        made = getattr(Compression, made, made)
    if not hasattr(made, "compress"):
        raise ConfigError(
            f"compression of op=Adasum must be Compression.none, Compression.fp16 or "
            f"Compression.bf16, got {compression!r}"
        )
    return cast("Compressor", made)

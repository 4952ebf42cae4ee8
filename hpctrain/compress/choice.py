"""Codecs by name, and the one that a program's ``compression`` asks for."""

import copy
from collections.abc import Callable, Mapping
from functools import partial
from typing import Any, cast

import torch

from hpctrain.compress.auto import Auto
from hpctrain.compress.codec import Codec, Compressor, Identity, TensorByTensor
from hpctrain.compress.half import Half, HalfCodec, NoCompression
from hpctrain.compress.int8 import Int8
from hpctrain.compress.power_sgd import PowerSGD
from hpctrain.compress.qsgd import QSGD
from hpctrain.compress.rail_codec import RailCodec
from hpctrain.compress.sign import OneBit, SignSGD
from hpctrain.compress.sparse import DeepGradientCompression, TopK
from hpctrain.core.errors import ConfigError
from hpctrain.core.target import check_arguments

CODECS: Mapping[str, Callable[..., Codec]] = {
    "none": Identity,
    "auto": Auto,
    "fp16": partial(HalfCodec, torch.float16),
    "bf16": partial(HalfCodec, torch.bfloat16),
    "int8": Int8,
    "qsgd": QSGD,
    "sign": SignSGD,
    "one_bit": OneBit,
    "top_k": TopK,
    "dgc": DeepGradientCompression,
    "power_sgd": PowerSGD,
}
"""By name; arguments are those of the class."""

Compressing = Compressor | Codec | str
"""What a program may give as ``compression``."""


def codec_named(name: str, args: Mapping[str, Any], key: str) -> Codec:
    """Return a new codec by its name, with arguments that a configuration has under ``key``.

    Raises ``ConfigError``: it does not take them.
    """
    check_arguments(CODECS[name], 0, args, key)
    try:
        return CODECS[name](**args)
    except (TypeError, ValueError) as error:  # a ConfigError is a ValueError
        raise ConfigError(f"{key} of {name}: {error}") from error


def codec_for(compression: "Compressing | None") -> Codec:
    """Return a new codec for a compressor of Horovod's form, a codec, or the name of one.

    Raises ``ConfigError``: there is none of this name.
    """
    if compression is None or isinstance(compression, NoCompression):
        return Identity()
    if isinstance(compression, str):
        if compression not in CODECS:
            raise ConfigError(
                f"compression is one of {', '.join(CODECS)}, or a codec of hpctrain.compress, got "
                f"{compression!r}"
            )
        return CODECS[compression]()
    if isinstance(compression, Identity | HalfCodec | RailCodec | Auto):
        return copy.deepcopy(compression)  # one for each optimizer, with a memory of its own
    if isinstance(compression, Half):
        return HalfCodec(compression.dtype)
    return TensorByTensor(cast("Compressor", compression))

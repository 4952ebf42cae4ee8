"""Sizes of a model, determined on the meta device."""

from collections import Counter
from typing import Any

import torch
from torch import nn

from hpctrain.core.errors import ConfigError
from hpctrain.core.target import resolve
from hpctrain.train.model import make_model
from hpctrain.train.run_config import ModelConfig

_HEADS = ("num_heads", "n_head", "n_heads", "num_attention_heads", "nhead", "heads")
_SEQUENCE = ("max_position_embeddings", "n_positions", "block_size", "max_seq_len", "sequence")
"""Names of attributes of a module, or of its ``config``, that contain the maximum length."""


def sizes_of(target: str) -> dict[str, Any]:
    """Build a model on the meta device and return its sizes.

    Args:
        target: ``module:function`` that returns the model.

    Returns:
        The sizes that were found. ``parameters``: number of trained elements; ``layers``: number
        of modules in the largest list of equal modules; ``heads``: number of attention heads;
        ``vocabulary`` and ``hidden``: shape of the largest embedding; ``tied``: whether input and
        output embedding share weights; ``sequence``: maximum length of a sequence.

    Raises:
        ConfigError: there is no such function, or it does not return a model on the meta device.
    """
    resolve(target, "--model", remedy="start hpctrain in its folder, or install it")
    try:
        with torch.device("meta"):
            model = make_model(ModelConfig(target=target))
    except (NotImplementedError, RuntimeError) as error:
        raise ConfigError(
            f"a model must be built on torch's meta device, without values, but {target} needs "
            f"values: {error}; pass --params, --layers, --hidden and --heads instead"
        ) from error
    parameters = [each for each in model.parameters() if each.requires_grad]
    found: dict[str, Any] = {
        "parameters": sum(each.numel() for each in parameters),
        "layers": _layers(model),
        "heads": _attribute(model, _HEADS),
    }
    embeddings = [each for each in model.modules() if isinstance(each, nn.Embedding)]
    if embeddings:
        words = max(embeddings, key=lambda each: each.num_embeddings)
        found |= {"vocabulary": words.num_embeddings, "hidden": words.embedding_dim}
        shapes = Counter(tuple(each.shape) for each in parameters)
        found["tied"] = shapes[words.num_embeddings, words.embedding_dim] < 2
        positions = [each.num_embeddings for each in embeddings if each is not words]
        found["sequence"] = _attribute(model, _SEQUENCE) or max(positions, default=None)
    return {name: value for name, value in found.items() if value is not None}


def _layers(model: nn.Module) -> int | None:
    """Return the number of layers of a model, or None without layers.

    The layers are the equal modules of one list; if there are several lists with equal modules,
    the list whose equal modules have the most parameters.
    """
    most, layers = (False, 0), None
    for module in model.modules():
        alike = Counter(
            (type(child), sum(each.numel() for each in child.parameters()))
            for child in module.children()
            if isinstance(module, nn.ModuleList | nn.Sequential)
        )
        for (_, size), number in alike.items():
            if size and (number > 1, number * size) > most:
                most, layers = (number > 1, number * size), number
    return layers


def _attribute(model: nn.Module, names: tuple[str, ...]) -> int | None:
    owners = (
        each for module in model.modules() for each in (module, getattr(module, "config", 0))
    )
    values = (getattr(owner, name, None) for owner in owners for name in names)
    return next((value for value in values if type(value) is int), None)

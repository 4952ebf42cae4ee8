"""Parameters, operations and activations of a transformer, by formula.

Sources: Narayanan et al. 2021, "Efficient large-scale language model training on GPU clusters
using Megatron-LM", for parameters and operations; Korthikanti et al. 2022, "Reducing activation
recomputation in large transformer models", for activations.
"""

import math
from dataclasses import dataclass
from typing import Any

from hpctrain.core.checks import Amount, AtLeast0, Bounds, CheckedFields, Number, Positive
from hpctrain.core.errors import ConfigError

SEQUENCE, VOCABULARY = 2048, 51200
"""Default tokens per sample, and default size of the vocabulary."""
RECOMPUTE = ("none", "selective", "full")
"""Parts that backward recomputes: nothing, attention scores, or a whole layer."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Transformer(CheckedFields):
    """A stack of identical layers with an embedding and an output layer.

    Raises:
        ConfigError: a value is out of range, or values contradict each other.
    """

    parameters: Amount
    """Number of trained parameters; all layers have equally many, not counting embeddings."""
    layers: Number
    hidden: Number  # elements per token between layers
    heads: Number
    sequence: Number = SEQUENCE  # tokens per sample
    vocabulary: Number = VOCABULARY
    tied: bool = True
    """Whether embedding and output layer share weights. If the two layers are on different
    pipeline stages, each of the stages stores a copy."""
    fused_attention: bool = False  # True if scores are not stored, as in FlashAttention
    parameter_bytes: Positive = 2.0
    gradient_bytes: Positive = 2.0
    optimizer_bytes: AtLeast0 = 12.0
    """Bytes of optimizer state per parameter; default: Adam's two moments and a float32 copy."""

    def check(self) -> None:
        """Raise ``ConfigError`` if values contradict each other."""
        if self.hidden % self.heads:
            raise ConfigError(
                f"the hidden size must be a multiple of the heads, got {self.heads} heads and a "
                f"hidden size of {self.hidden}; change one of them"
            )
        if self.layer_parameters <= 0:
            raise ConfigError(
                f"layers must have parameters, got {self.parameters:.4g} in total, with "
                f"{self.embeddings:.4g} for a vocabulary of {self.vocabulary} and a hidden size "
                f"of {self.hidden}; use smaller sizes"
            )

    @classmethod
    def of(cls, parameters: float | None = None, **sizes: Any) -> "Transformer":
        """Return a transformer, with missing sizes estimated from typical large models.

        The estimate assumes 12 ``hidden**2`` parameters per layer, a hidden size of about 128 per
        layer, and heads of at most 128 elements.

        Raises:
            ConfigError: neither ``parameters`` nor both ``layers`` and ``hidden`` are given.
        """
        layers, hidden = sizes.get("layers"), sizes.get("hidden")
        words, tokens = sizes.get("vocabulary", VOCABULARY), sizes.get("sequence", SEQUENCE)
        if parameters is None:
            if not layers or not hidden:
                raise ConfigError(
                    "a model must have parameters, or layers and a hidden size, got neither; "
                    "use --params, or --layers and --hidden"
                )
            parameters = layers * (12 * hidden + 13) * hidden + (words + tokens) * hidden
        Bounds(above=0, below=math.inf).check("parameters", parameters)
        if not hidden:
            found = (128 / 12 * parameters) ** (1 / 3)
            if layers:  # 12 layers h^2 + vocabulary h = parameters
                found = 2 * parameters / (words + math.sqrt(words**2 + 48 * layers * parameters))
            unit = 2 ** max(0, math.frexp(found)[1] - 3)  # many numbers of ranks divide it
            hidden = max(1, round(found / unit)) * unit
        if not layers:
            found = max(1.0, (parameters - words * hidden) / (12 * hidden**2))
            layers = round(found / 4) * 4 if found >= 8 else round(found)
        head = max(size for size in range(1, 129) if hidden % size == 0)
        filled = {"layers": layers, "hidden": hidden, "heads": hidden // head}
        return cls(parameters=parameters, **(filled | sizes))

    @property
    def embedding(self) -> float:
        """Number of parameters of the embedding; the output layer has the same number."""
        return float(self.vocabulary * self.hidden)

    @property
    def embeddings(self) -> float:
        """Number of parameters of embedding and output layer; tied parameters count once."""
        return self.embedding * (1 if self.tied else 2)

    @property
    def layer_parameters(self) -> float:
        """Number of parameters of a layer."""
        return (self.parameters - self.embeddings) / self.layers

    @property
    def state_bytes(self) -> float:
        """Bytes per parameter, including its gradient and the state of the optimizer."""
        return self.parameter_bytes + self.gradient_bytes + self.optimizer_bytes

    @property
    def attention_flops(self) -> float:
        """Operations of attention scores and weighted sums per sample in the forward pass."""
        return 4.0 * self.sequence**2 * self.hidden

    @property
    def layer_flops(self) -> float:
        """Operations of a layer per sample in the forward pass; backward has twice as many."""
        return 2 * self.layer_parameters * self.sequence + self.attention_flops

    @property
    def output_flops(self) -> float:
        """Operations of the output layer per sample in the forward pass."""
        return 2 * self.embedding * self.sequence

    @property
    def input_bytes(self) -> float:
        """Bytes of the activations of one sample between two layers."""
        return self.parameter_bytes * self.sequence * self.hidden

    @property
    def output_activations(self) -> float:
        """Bytes per sample that the output layer and the last norm store for the backward pass."""
        return (2 * self.parameter_bytes * self.hidden + 4 * self.vocabulary) * self.sequence

    def activations(self, recompute: str) -> tuple[float, float]:
        """Return a layer's bytes per sample of stored activations, and of recomputed activations.

        Recomputed activations exist for one layer at a time. Tensor and context parallel ranks
        divide both numbers evenly.
        """
        elements = self.parameter_bytes / 2 * self.sequence * self.hidden
        linear, kept = 34 * elements, 2 * elements  # bytes, including masks of dropout
        scores = 5 * elements / self.hidden * self.sequence * self.heads
        if self.fused_attention:
            scores = 0.0
        return {
            "none": (linear + scores, 0.0),
            "selective": (linear, scores),
            "full": (kept, linear + scores),
        }[recompute]

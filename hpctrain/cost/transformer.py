"""A transformer by its sizes: parameters, arithmetic and activations, in closed form.

Sources: Narayanan et al. 2021, "Efficient large-scale language model training on GPU clusters
using Megatron-LM", for parameters and arithmetic; Korthikanti et al. 2022, "Reducing activation
recomputation in large transformer models", for activations.
"""

import math
from dataclasses import dataclass
from typing import Any

from hpctrain.core.checks import Amount, AtLeast0, Bounds, CheckedFields, Number, Positive
from hpctrain.core.errors import ConfigError

SEQUENCE, VOCABULARY = 2048, 51200
"""What is taken where nobody says how long samples are, and of how many words."""
RECOMPUTE = ("none", "selective", "full")
"""What backward computes again: nothing, scores of attention, or all of a layer from its input."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Transformer(CheckedFields):
    """A stack of alike layers below a vocabulary; ``ConfigError`` where a rule is broken."""

    parameters: Amount
    """All that are trained; what embeddings do not have is spread evenly over the layers."""
    layers: Number
    hidden: Number  # elements of a token between two layers
    heads: Number
    sequence: Number = SEQUENCE  # tokens of a sample
    vocabulary: Number = VOCABULARY
    tied: bool = True
    """Whether the output has the weights of the embedding; stages apart hold a copy each."""
    fused_attention: bool = False  # whether it keeps no scores, as FlashAttention does
    parameter_bytes: Positive = 2.0
    gradient_bytes: Positive = 2.0
    optimizer_bytes: AtLeast0 = 12.0
    """Of a parameter: Adam's two moments and a copy of the parameter in float32."""

    def check(self) -> None:
        """Raise ``ConfigError`` if values contradict each other."""
        if self.hidden % self.heads:
            raise ConfigError(
                f"heads divide the hidden size, got {self.heads} heads and a hidden size of "
                f"{self.hidden}; change one of them"
            )
        if self.layer_parameters <= 0:
            raise ConfigError(
                f"layers have parameters beside the embedding, got {self.parameters:.4g} in all "
                f"and {self.embeddings:.4g} for a vocabulary of {self.vocabulary} and a hidden "
                f"size of {self.hidden}; give smaller ones"
            )

    @classmethod
    def of(cls, parameters: float | None = None, **sizes: Any) -> "Transformer":
        """Fill in what is not given: parameters by formula, sizes as large models have them.

        A guess has layers of 12 parameters for each square of the hidden size, which is about 128
        for each layer, and heads of 128 elements. Raises ``ConfigError``: there are neither
        parameters nor layers and a hidden size.
        """
        layers, hidden = sizes.get("layers"), sizes.get("hidden")
        words, tokens = sizes.get("vocabulary", VOCABULARY), sizes.get("sequence", SEQUENCE)
        if parameters is None:
            if not layers or not hidden:
                raise ConfigError(
                    "a model is known by its parameters, or by its layers and hidden size, got "
                    "neither; give --params, or --layers and --hidden"
                )
            parameters = layers * (12 * hidden + 13) * hidden + (words + tokens) * hidden
        Bounds(above=0, below=math.inf).check("parameters", parameters)
        if not hidden:
            found = (128 / 12 * parameters) ** (1 / 3)
            if layers:  # 12 layers h^2 + vocabulary h = parameters
                found = 2 * parameters / (words + math.sqrt(words**2 + 48 * layers * parameters))
            unit = 2 ** max(0, math.frexp(found)[1] - 3)  # one that many ranks divide
            hidden = max(1, round(found / unit)) * unit
        if not layers:
            found = max(1.0, (parameters - words * hidden) / (12 * hidden**2))
            layers = round(found / 4) * 4 if found >= 8 else round(found)
        head = max(size for size in range(1, 129) if hidden % size == 0)
        filled = {"layers": layers, "hidden": hidden, "heads": hidden // head}
        return cls(parameters=parameters, **(filled | sizes))

    @property
    def embedding(self) -> float:
        """Parameters of the embedding, or of the output."""
        return float(self.vocabulary * self.hidden)

    @property
    def embeddings(self) -> float:
        """Parameters of both."""
        return self.embedding * (1 if self.tied else 2)

    @property
    def layer_parameters(self) -> float:
        """Parameters of a layer."""
        return (self.parameters - self.embeddings) / self.layers

    @property
    def state_bytes(self) -> float:
        """Bytes of a parameter with its gradient and the optimizer's state."""
        return self.parameter_bytes + self.gradient_bytes + self.optimizer_bytes

    @property
    def attention_flops(self) -> float:
        """Operations of scores, and of the sums weighted by them, for a sample, forward."""
        return 4.0 * self.sequence**2 * self.hidden

    @property
    def layer_flops(self) -> float:
        """Operations of a layer for a sample, forward; backward takes twice as many."""
        return 2 * self.layer_parameters * self.sequence + self.attention_flops

    @property
    def output_flops(self) -> float:
        """Operations of the output for a sample, forward."""
        return 2 * self.embedding * self.sequence

    @property
    def input_bytes(self) -> float:
        """Bytes of a sample between two layers."""
        return self.parameter_bytes * self.sequence * self.hidden

    @property
    def output_activations(self) -> float:
        """Bytes that the end of the model keeps of a sample: its input, a norm's, the scores."""
        return (2 * self.parameter_bytes * self.hidden + 4 * self.vocabulary) * self.sequence

    def activations(self, recompute: str) -> tuple[float, float]:
        """Return bytes that a layer keeps of a sample, and those that it computes again.

        The latter are there of one layer at a time. Both are divided evenly among tensor and
        context parallel ranks.
        """
        elements = self.parameter_bytes / 2 * self.sequence * self.hidden
        linear, kept = 34 * elements, 2 * elements  # bytes of 16-bit training and its masks
        scores = 5 * elements / self.hidden * self.sequence * self.heads
        if self.fused_attention:
            scores = 0.0
        return {
            "none": (linear + scores, 0.0),
            "selective": (linear, scores),
            "full": (kept, linear + scores),
        }[recompute]

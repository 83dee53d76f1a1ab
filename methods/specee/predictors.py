"""Exit predictors of SpecEE: does an early layer already predict the target's next token?

Xu et al., arXiv:2504.08850. Each predictor is a perceptron with one hidden layer. It reads the
logits of a few candidate tokens at an early layer.
"""

from __future__ import annotations

import json
from collections import deque
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any, ClassVar, Self

import torch
from torch import Tensor

from specbench_cli.api import Artifact, Decoder, EnvironmentFault, Weights, sha256_of

_HINT = "use predictors that were trained for this target, or train them: specbench train specee"
TOP = 4
"""Number of candidates, as in the authors' code."""


def make_predictor_input(logits: Tensor, before: Tensor | None) -> tuple[Tensor, Tensor]:
    """Return the input of a predictor, [..., 3 * k], and the local probabilities, [..., k].

    The local probabilities are the softmax over the k candidates. The input consists of the logits,
    the local probabilities, and their change since the last check.

    Args:
        logits: Logits of the candidates, [..., k].
        before: Local probabilities at the last check. None at the first check. Then the change is
            equal to the local probabilities.
    """
    local = logits.softmax(-1)
    change = local if before is None else local - before
    return torch.cat((logits, local, change), -1), local


def choose_layers(offline: Iterable[int], exits: deque[int], n_layers: int) -> list[int]:
    """Return the layers at which a predictor is checked (the paper's two-level scheduling).

    Args:
        offline: Layers that are always checked.
        exits: Layers of recent exits. Once the deque is full, these layers are checked too, and
            also the two layers before and after each of them.
        n_layers: Number of layers of the target.
    """
    recent = exits if len(exits) == exits.maxlen else ()
    around = {at + off for at in recent for off in (-2, 0, 2)}
    return sorted({*offline, *around} & {*range(1, n_layers)})


class ExitPredictors(Artifact):
    """Trained exit predictors: one for each target layer except the last.

    L is the number of layers.

    Args:
        up: Weights of the first layer, [L - 1, 3 * k, width].
        up_bias: Biases of the first layer, [L - 1, width].
        down: Weights of the second layer, [L - 1, width].
        down_bias: Biases of the second layer, [L - 1].
        layers: Target layers that are always checked, counted from 1, in ascending order.

    Attributes:
        top: Number of candidate tokens (k).
    """

    kind: ClassVar[str] = "exits"
    hint: ClassVar[str] = "specbench train specee --out DIR, then --set specee.head=DIR/exits"

    def __init__(
        self,
        up: Tensor,
        up_bias: Tensor,
        down: Tensor,
        down_bias: Tensor,
        *,
        layers: tuple[int, ...],
    ) -> None:
        self._parts = up, up_bias, down, down_bias
        self.top, self.layers = up.shape[1] // 3, layers
        self.weight_bytes = sum(part.nbytes for part in self._parts)

    def __call__(self, layer: int, features: Tensor) -> Tensor:
        """Return the probability that this layer already predicts the target's token, [n].

        Args:
            layer: Number of the layer, counted from 1.
            features: Input of the predictor, [n, 3 * k], from `make_predictor_input`.
        """
        up, up_bias, down, down_bias = (part[layer - 1] for part in self._parts)
        inner = (features.to(up.dtype) @ up + up_bias).relu()
        return (inner @ down + down_bias).sigmoid()

    @classmethod
    def load(cls, folder: Path, decoders: Mapping[str, Decoder]) -> Self:
        """Load the predictors from a folder with config.json and a safetensors file.

        Raises:
            EnvironmentFault: The files cannot be read, or the predictors are for another target.
        """
        file, target = folder / "config.json", decoders["target"]
        config: dict[str, Any] = {}
        if file.is_file():
            config = json.loads(file.read_text(encoding="utf-8"))
        trained_for, layers = config.get("specbench", {}).get("target_sha256"), config.get("layers")
        if config.get("n_layers") != target.n_layers or not isinstance(layers, list):
            raise EnvironmentFault(
                f"{folder.name} contains no predictors for a target with {target.n_layers} layers",
                _HINT,
            )
        if trained_for and sha256_of(target) not in (None, trained_for):
            raise EnvironmentFault(f"{folder.name} was trained for another target", _HINT)
        if not all(type(each) is int and 0 < each < target.n_layers for each in layers):
            raise EnvironmentFault(
                f"{folder.name}: layers is {layers}; it must contain numbers from 1 to"
                f" {target.n_layers - 1}",
                _HINT,
            )
        weights = Weights(folder)
        try:
            names = ("up", "up_bias", "down", "down_bias")
            parts = [weights[name].to(target.device).float() for name in names]
        except KeyError as missing:
            raise EnvironmentFault(f"{folder.name}: missing tensor {missing}", _HINT) from None
        weights.check_names(names, _HINT)
        n, reads, width = parts[0].shape if parts[0].dim() == 3 else (0, 0, 0)
        shapes = [(target.n_layers - 1, reads, width), (n, width), (n, width), (n,)]
        if [part.shape for part in parts] != shapes or not reads or reads % 3:
            raise EnvironmentFault(f"{folder.name}: tensors have wrong shapes", _HINT)
        return cls(*parts, layers=tuple(sorted(set(layers))))

    @classmethod
    def random(cls, decoders: Mapping[str, Decoder], seed: int = 0) -> Self:
        """Return predictors with random weights. Decoding then checks every layer."""
        target, generator = decoders["target"], torch.Generator().manual_seed(seed)
        dtype = torch.promote_types(target.dtype, torch.float32)
        n, reads, width = target.n_layers - 1, 3 * min(TOP, target.vocab_size), 8
        shapes = (n, reads, width), (n, width), (n, width), (n,)
        parts = [
            torch.randn(shape, generator=generator, dtype=torch.float64).to(target.device, dtype)
            for shape in shapes
        ]
        return cls(*parts, layers=tuple(range(1, target.n_layers)))

"""Head of Judge Decoding. It predicts from a target hidden state whether a draft token is harmless.

Bachmann et al., arXiv:2501.19309: one linear layer on the last hidden state, and a sigmoid.
"""

from __future__ import annotations

import json
import math
from collections.abc import Mapping
from pathlib import Path
from typing import Any, ClassVar, Self

import torch
from torch import Tensor

from specbench_cli.api import Artifact, Decoder, EnvironmentFault, Weights, sha256_of

_HINT = "use a judge that was trained for this target, or train one: specbench train judge"


class JudgeHead(Artifact):
    """Trained judge: a logistic regression over hidden states of the target.

    Args:
        weight: Weight of the regression, [hidden]. Its input is the hidden state after the target's
            final norm.
        bias: Bias of the regression, [1].
    """

    kind: ClassVar[str] = "judge"
    hint: ClassVar[str] = "specbench train judge --out DIR, then --set judge.head=DIR/judge"

    def __init__(self, weight: Tensor, bias: Tensor) -> None:
        self._weight, self._bias = weight, bias
        self.weight_bytes = weight.nbytes + bias.nbytes

    def __call__(self, rows: Tensor) -> Tensor:
        """Return the probability that a token is harmless, for each of n tokens.

        Args:
            rows: The target's normed hidden states at the tokens, [n, hidden].
        """
        return (rows.to(self._weight.dtype) @ self._weight + self._bias).sigmoid()

    @classmethod
    def load(cls, folder: Path, decoders: Mapping[str, Decoder]) -> Self:
        """Load the judge from a folder with config.json and a safetensors file.

        Raises:
            EnvironmentFault: The files cannot be read, or the judge is for another target.
        """
        file, target = folder / "config.json", decoders["target"]
        config: dict[str, Any] = {}
        if file.is_file():
            config = json.loads(file.read_text(encoding="utf-8"))
        trained_for = config.get("specbench", {}).get("target_sha256")
        if config.get("hidden_size") != target.hidden_size:
            raise EnvironmentFault(
                f"{folder.name} is not a judge for hidden size {target.hidden_size}", _HINT
            )
        if trained_for and sha256_of(target) not in (None, trained_for):
            raise EnvironmentFault(f"{folder.name} was trained for another target", _HINT)
        weights, names = Weights(folder), ("weight", "bias")
        try:
            parts = [weights[name].to(target.device).float() for name in names]
        except KeyError as missing:
            raise EnvironmentFault(f"{folder.name}: missing tensor {missing}", _HINT) from None
        weights.check_names(names, _HINT)
        if [part.shape for part in parts] != [(target.hidden_size,), (1,)]:
            raise EnvironmentFault(f"{folder.name}: tensors have wrong shapes", _HINT)
        return cls(*parts)

    @classmethod
    def random(cls, decoders: Mapping[str, Decoder], seed: int = 0) -> Self:
        """Return a judge with random weights. Its probabilities are spread over (0, 1)."""
        target, generator = decoders["target"], torch.Generator().manual_seed(seed)
        dtype = torch.promote_types(target.dtype, torch.float32)
        weight = torch.randn(target.hidden_size, generator=generator, dtype=torch.float64)
        weight *= 4 / math.sqrt(target.hidden_size)
        return cls(weight.to(target.device, dtype), torch.zeros(1, dtype=dtype).to(target.device))

"""Acceptance head of SpecDec++: predicts whether the target will accept a draft token.

Huang et al., arXiv:2405.19715. The head reads the draft model's hidden state at the token. It has
residual blocks x := x + SiLU(W x + b), and a linear layer with two logits, for rejection and
acceptance. In the authors' code (github.com/Kaffaljidhmah2/SpecDec_pp) all blocks share their
weights, and a checkpoint contains the block once or several times.
"""

from __future__ import annotations

import json
import math
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, ClassVar, Self

import torch
from torch import Tensor
from torch.nn.functional import linear, silu

from specbench_cli.api import Artifact, Decoder, EnvironmentFault, Weights, sha256_of

Affine = tuple[Tensor, Tensor]
"""Weight [out, in] and bias [out]."""

DEPTH, MOST_BLOCKS = 3, 64
"""Number of blocks of a random head, and maximum `num_layers` in a file."""

_HINT = "use a head that was trained for this draft, or train one: specbench train specdec++"


class AcceptanceHead(Artifact):
    """Acceptance head of SpecDec++: predicts whether the target accepts a draft token.

    Args:
        draft: Draft model whose hidden states the head reads.
        blocks: Weight [hidden, hidden] and bias of each residual block, in order.
        last: Weight [2, hidden] and bias of the last layer. Its second logit is for acceptance.
    """

    kind: ClassVar[str] = "acceptance"

    def __init__(self, draft: Decoder, blocks: Sequence[Affine], last: Affine) -> None:
        self._norm = draft.norm
        self._blocks = tuple(blocks)
        weight, bias = last
        # Store only the difference of the two output rows, because the softmax of two logits
        # depends only on their difference.
        self._last = weight[1:] - weight[:1], bias[1:] - bias[:1]
        parts = {id(part): part for affine in (*blocks, self._last) for part in affine}
        self.weight_bytes = sum(part.nbytes for part in parts.values())

    @torch.inference_mode()
    def __call__(self, rows: Tensor) -> Tensor:
        """Return the acceptance probabilities of n draft tokens, [n].

        Args:
            rows: Outputs of the draft model's last layer at these tokens, [n, hidden].
        """
        x = self._norm(rows).to(self._last[0].dtype)
        for weight, bias in self._blocks:
            x = x + silu(linear(x, weight, bias))
        return linear(x, *self._last)[:, 0].sigmoid()

    @classmethod
    def load(cls, folder: Path, decoders: Mapping[str, Decoder]) -> Self:
        """Load the head from a folder with config.json and a safetensors file.

        Raises:
            EnvironmentFault: The files cannot be read, or the head is for other models.
        """
        config = _config(folder)
        draft, width, depth = decoders["draft"], config["hidden_size"], config["num_layers"]
        if width != draft.hidden_size:
            raise EnvironmentFault(
                f"{folder.name} is for hidden size {width}; this draft's is {draft.hidden_size}",
                _HINT,
            )
        for role in ("target", "draft"):
            trained_for = config.get("specbench", {}).get(f"{role}_sha256")
            if trained_for and sha256_of(decoders[role]) not in (None, trained_for):
                raise EnvironmentFault(f"{folder.name} was trained for another {role}", _HINT)
        weights = Weights(folder)
        if type(depth) is not int or not 0 <= depth <= MOST_BLOCKS:
            raise EnvironmentFault(
                f"{folder.name}: num_layers is {depth!r}; it must be from 0 to {MOST_BLOCKS}", _HINT
            )
        stored = [at for at in range(depth) if f"model.{at}.linear.weight" in weights]
        try:
            blocks = [_affine(weights, f"model.{at}.linear", draft) for at in stored]
            last = _affine(weights, f"model.{depth}", draft)
        except KeyError as missing:
            raise EnvironmentFault(f"{folder.name}: missing tensor {missing}", _HINT) from None
        places = [*(f"model.{at}.linear" for at in stored), f"model.{depth}"]
        known = {f"{place}.{part}" for place in places for part in ("weight", "bias")}
        weights.check_names(known, _HINT)
        if len(blocks) not in (1, depth):
            raise EnvironmentFault(
                f"{folder.name} contains {len(blocks)} blocks; num_layers is {depth}, so there must"
                f" be 1 or {depth}",
                _HINT,
            )
        return cls(draft, blocks if len(blocks) == depth else blocks * depth, last)

    @classmethod
    def random(cls, decoders: Mapping[str, Decoder], seed: int = 0) -> Self:
        """Return a head with random weights. Its probabilities are spread over (0, 1)."""
        draft = decoders["draft"]
        width, generator = draft.hidden_size, torch.Generator().manual_seed(seed)

        def affine(n: int, gain: float) -> Affine:
            weight = torch.randn(n, width, generator=generator, dtype=torch.float64)
            bias = torch.randn(n, generator=generator, dtype=torch.float64)
            dtype = torch.promote_types(draft.dtype, torch.float32)
            weight *= gain / math.sqrt(width)
            return weight.to(draft.device, dtype), bias.to(draft.device, dtype)

        return cls(draft, [affine(width, 1.0) for _ in range(DEPTH)], affine(2, 2.0))


def _affine(weights: Weights, name: str, draft: Decoder) -> Affine:
    weight, bias = (weights[f"{name}.{part}"] for part in ("weight", "bias"))
    return weight.to(draft.device).float(), bias.to(draft.device).float()


def _config(folder: Path) -> dict[str, Any]:
    file = folder / "config.json"
    if not file.is_file():
        raise EnvironmentFault(
            f"{folder.name} is not an acceptance head: config.json is missing", _HINT
        )
    config: dict[str, Any] = json.loads(file.read_text(encoding="utf-8"))
    if not {"hidden_size", "num_layers"} <= config.keys():
        raise EnvironmentFault(
            f"{folder.name} is not an acceptance head: hidden_size or num_layers is missing in"
            " config.json",
            _HINT,
        )
    return config

"""Head of SpecDec++: predicts from the draft's hidden state at a token whether it is accepted.

Huang et al., arXiv:2405.19715: blocks x := x + SiLU(W x + b), then two logits. The second is for
acceptance. The authors' code (github.com/Kaffaljidhmah2/SpecDec_pp) repeats one block. Such a
checkpoint contains it once, or as often as it is applied.
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
"""Number of blocks of a random head, and maximum number of applied blocks in a file."""

_ANOTHER = "choose a head that was trained with this draft, or: specbench train specdec++"


class AcceptanceHead(Artifact):
    """Trained predictor of acceptance.

    Args:
        draft: Draft model whose hidden states it reads.
        blocks: Blocks in the order of application, each [hidden, hidden].
        last: [2, hidden]. The second logit is for acceptance.
    """

    kind: ClassVar[str] = "acceptance"

    def __init__(self, draft: Decoder, blocks: Sequence[Affine], last: Affine) -> None:
        self._norm = draft.norm
        self._blocks = tuple(blocks)
        weight, bias = last
        # The softmax of two logits depends only on their difference.
        self._last = weight[1:] - weight[:1], bias[1:] - bias[:1]
        parts = {id(part): part for affine in (*blocks, self._last) for part in affine}
        self.weight_bytes = sum(part.nbytes for part in parts.values())

    @torch.inference_mode()
    def __call__(self, rows: Tensor) -> Tensor:
        """Return acceptance probabilities [n] from the outputs [n, hidden] of the draft's last
        layer."""
        x = self._norm(rows).to(self._last[0].dtype)
        for weight, bias in self._blocks:
            x = x + silu(linear(x, weight, bias))
        return linear(x, *self._last)[:, 0].sigmoid()

    @classmethod
    def load(cls, folder: Path, decoders: Mapping[str, Decoder]) -> Self:
        """Load the head in a folder: config.json with its sizes, and safetensors.

        Raises:
            EnvironmentFault: The files cannot be read, or the head is for other models.
        """
        config = _config(folder)
        draft, width, depth = decoders["draft"], config["hidden_size"], config["num_layers"]
        if width != draft.hidden_size:
            raise EnvironmentFault(
                f"{folder.name} reads rows of {width} numbers; this draft's have"
                f" {draft.hidden_size}",
                _ANOTHER,
            )
        for role in ("target", "draft"):
            trained_for = config.get("specbench", {}).get(f"{role}_sha256")
            if trained_for and sha256_of(decoders[role]) not in (None, trained_for):
                raise EnvironmentFault(f"{folder.name} was trained with another {role}", _ANOTHER)
        weights = Weights(folder)
        if type(depth) is not int or not 0 <= depth <= MOST_BLOCKS:
            raise EnvironmentFault(
                f"{folder.name}: num_layers is {depth!r}; a head has 0 to {MOST_BLOCKS}", _ANOTHER
            )
        held = [at for at in range(depth) if f"model.{at}.linear.weight" in weights]
        try:
            blocks = [_affine(weights, f"model.{at}.linear", draft) for at in held]
            last = _affine(weights, f"model.{depth}", draft)
        except KeyError as missing:
            raise EnvironmentFault(f"{folder.name} lacks the tensor {missing}", _ANOTHER) from None
        places = [*(f"model.{at}.linear" for at in held), f"model.{depth}"]
        known = {f"{place}.{part}" for place in places for part in ("weight", "bias")}
        weights.check_names(known, _ANOTHER)
        if len(blocks) not in (1, depth):
            raise EnvironmentFault(
                f"{folder.name} holds {len(blocks)} blocks of {depth}: neither one nor all",
                _ANOTHER,
            )
        return cls(draft, blocks if len(blocks) == depth else blocks * depth, last)

    @classmethod
    def random(cls, decoders: Mapping[str, Decoder], seed: int = 0) -> Self:
        """Return a head whose outputs cover (0, 1)."""
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
        raise EnvironmentFault(f"{folder.name} is no acceptance head: no config.json", _ANOTHER)
    config: dict[str, Any] = json.loads(file.read_text(encoding="utf-8"))
    if not {"hidden_size", "num_layers"} <= config.keys():
        raise EnvironmentFault(
            f"{folder.name} is no acceptance head: its config.json names neither hidden_size nor"
            " num_layers",
            _ANOTHER,
        )
    return config

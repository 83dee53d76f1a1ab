"""Draft head of Clover.

Bin Xiao, Chunan Shi, Xiaonan Nie, Fan Yang, Xiangwei Deng, Lei Su, Weipeng Chen, Bin Cui: Clover:
Regressive Lightweight Speculative Decoding with Sequential Knowledge, 2024, arXiv:2405.00263. The
authors' code is not public. The gate and the projection before the output matrix follow the
successor of Clover (Clover-2, arXiv:2408.00264, github.com/XiaoBin1992/clover).

Augmenting block: one Llama layer over the target's hidden states. Its output is the state s_0.

Regressive attention: a token y and the state s give the next state
s' = s + concat_i(cos(q_i, k_i) v_i), where q = W_q norm(s), k = W_k e(y), v = W_v e(y), e(y) is the
embedding of y, and the index i runs over the attention heads. The cosine scales the value of its
attention head. The target's output matrix predicts the next token from norm(s' + W_o [s', e(y)]).
All draft steps use the same weights.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping
from dataclasses import replace
from typing import Any, ClassVar, Self

import torch
from torch import Tensor, nn
from torch.nn.functional import cosine_similarity

from methods._heads.files import HeadShape, LoadedHead, head_mismatch
from methods._heads.layer import PrefixLayerHead
from methods._heads.layouts import Layout
from methods._heads.module import HeadOutput, PrefixHead
from methods._heads.recipe import HeadRecipe, Objective, TargetStatistics
from specbench_cli.api import Decoder

_HEAD_DIM = 32
_HEADS = 4
"""Number of heads of the regressive attention, each with one gate."""


class Clover(PrefixHead):
    """Clover's draft head as a torch module, for training."""

    kind: ClassVar[str] = "clover"
    layouts: ClassVar[tuple[Layout, ...]] = (
        Layout(
            kind,
            "Clover (specbench)",
            r"augment\.self_attn\.q_proj\.weight",
            {"augment.": "layer."}
            | {f"{own}.": f"{own}." for own in ("norm", "before", "q", "k", "v", "o", "after")},
            required=("norm.weight", "o.weight"),
        ),
    )
    config: ClassVar[Mapping[str, Any]] = {"architectures": ["Clover"]}
    recipe: ClassVar[HeadRecipe] = HeadRecipe(
        corpus_updates=500,
        reply_updates=500,
        losses={"paper": Objective(4, decay=1.0, text_labels=True), "ttt": Objective(4)},
        mlp=384,
    )

    def build(self, tensor_names: Collection[str]) -> None:
        """Create the submodules of the head.

        The constructor of the base class calls this method.
        """
        super().build(tensor_names)
        width = self.shape.hidden_size
        self.before, self.after = self.new_norm(), self.new_norm()
        self.q, self.k, self.v = (nn.Linear(width, width) for _ in range(3))
        self.o = nn.Linear(2 * width, width)

    @classmethod
    def new(cls, shape: HeadShape, rope: Mapping[str, Any], target: TargetStatistics) -> Self:
        """Return an untrained head.

        Its transformer layer (the augmenting block) has a small `head_dim`.
        """
        return cls(replace(shape, head_dim=min(_HEAD_DIM, shape.head_dim)), rope)

    def init_weights(self, std: float) -> None:
        """Initialise the head so that regressive attention has no effect before training."""
        super().init_weights(std)
        for part in (self.v, self.o):
            nn.init.zeros_(part.weight)
        for part in (self.q, self.k, self.v, self.o):
            nn.init.zeros_(part.bias)

    @classmethod
    def init_args(cls, files: LoadedHead, target: Decoder) -> dict[str, Any]:
        """Return no further constructor arguments.

        Raises:
            EnvironmentFault: The hidden size of the head is not the target's.
        """
        found, d = tuple(files.tensors["o.weight"].shape), target.hidden_size
        if found != (d, 2 * d):
            what = f"o has shape {list(found)}; this target needs {[d, 2 * d]}"
            raise head_mismatch(files, what)
        return {}

    def step(self, embedded: Tensor, rows: Tensor) -> HeadOutput:
        """Apply regressive attention to a state and a token.

        `HeadOutput.hidden` is [s', e(y)]: the next state and the embedding of the token. The next
        step reads s' from it.
        """
        state = rows[..., : self.shape.hidden_size]
        gates = _HEADS if state.shape[-1] % _HEADS == 0 else 1
        q, k, v = (
            part.unflatten(-1, (gates, -1))
            for part in (self.q(self.before(state)), self.k(embedded), self.v(embedded))
        )
        state = state + (cosine_similarity(q, k, -1)[..., None] * v).flatten(-2)
        left = torch.cat((state, embedded), -1)
        return HeadOutput(left, self.after(state + self.o(left)))


class CloverHead(PrefixLayerHead):
    """Clover's draft head for decoding."""

    kind: ClassVar[str] = Clover.kind
    module: ClassVar[type[PrefixHead]] = Clover

"""Data types of the engine: model inputs and outputs, drafts, verification results, steps.

In shapes, b is the number of sequences, n the number of rows (tokens) of a forward, m the number of
draft tokens, and V the vocabulary size. docs/reference/glossary.md defines the terms.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import InitVar, dataclass, field
from typing import TYPE_CHECKING, Any, Literal, get_args

from specbench_cli.former_names import DRAW_MODES, current_draw_mode, renamed_members

if TYPE_CHECKING:
    from torch import Tensor

DrawMode = Literal["deterministic", "independent", "without_replacement"]
"""How draft tokens were chosen: without a draw, by independent draws from q, or by draws without
replacement."""

Origin = Literal["prefill", "accepted", "recovered", "bonus", "plain", "relaxed"]
"""Origin of a committed token.

prefill: the first token, after the prompt. accepted: a draft token that the lossless rule keeps.
relaxed: a draft token that only a lossy accept rule keeps. recovered: the token after a rejected
    draft
token. bonus: the token after a fully accepted draft. plain: a token of a step without a draft."""

Guarantee = Literal["exact_tokens", "exact_law", "bounded", "quality_only", "workflow"]
"""Guarantees of a method about its output, strongest first. The first two are lossless."""

Rule = Literal["greedy", "rejection", "block", "coupled"]
"""Verification rule.

greedy: argmax. rejection, block: rejection sampling, token by token or of whole blocks. coupled:
argmax of log-probability plus Gumbel noise that is keyed by seed and position, so that all methods
emit the same text."""

Role = Literal["prefill", "draft", "verify", "aux"]
"""Purpose of a forward. "aux" is an auxiliary forward, such as an early exit."""

SublayerKind = Literal["attention", "mlp"]
SUBLAYERS: tuple[SublayerKind, ...] = get_args(SublayerKind)
"""Sublayers of a transformer layer."""

Sublayer = tuple[int, SublayerKind]
"""Layer number and sublayer."""

Skip = frozenset[int | Sublayer]
"""Layers and sublayers that a forward skips. Hidden states pass them unchanged. A layer without
attention writes no keys and values."""


def expand_skip(skip: Skip) -> frozenset[Sublayer]:
    """Return the skipped sublayers (attention or MLP of a layer).

    A skipped layer counts as both of its sublayers.
    """
    return frozenset(
        sublayer
        for each in skip
        for sublayer in ([(each, of) for of in SUBLAYERS] if isinstance(each, int) else [each])
    )


@dataclass(frozen=True, slots=True)
class Tokens:
    """Token ids, an int64 tensor [b, n] on the decoder's device."""

    ids: Tensor


@dataclass(frozen=True, slots=True)
class Hidden:
    """Hidden states [b, n, hidden] that enter layer `layers[0]` of a forward.

    A forward that continues after an exit layer uses them as input.
    """

    rows: Tensor


@dataclass(frozen=True, slots=True)
class Features:
    """Input of a draft head.

    ids: Token ids, int64 [b, n].
    rows: For each id, the target's features of the token before it, [b, n, width].
    """

    ids: Tensor
    rows: Tensor


Input = Tokens | Hidden | Features
"""Input of a forward. Each decoder supports some of these types."""


@dataclass(frozen=True, slots=True)
class ExtraInput:
    """Input of a model in addition to the text, for encoders and image-text models
    (`Decoder.attach`).

    ids: Input ids of an encoder.
    images: Output of the image processor ("pixel_values"). The module's forward receives it. The
        text contains the model family's image token at each image's position.
    """

    ids: tuple[int, ...] = ()
    images: Mapping[str, Tensor] = field(default_factory=dict)


@renamed_members(taps="aux_hidden_states")
@dataclass(frozen=True, slots=True)
class ModelOutput:
    """Output of a forward.

    logits: [b, r, V] in the decoder's dtype, one row for each requested position. None if no logits
        were requested.
    hidden: [b, n, hidden], output of the last layer that ran, before the final norm.
    aux_hidden_states: For each captured layer number, the output [b, n, hidden] of that layer.
    """

    logits: Tensor | None
    hidden: Tensor
    aux_hidden_states: Mapping[int, Tensor] = field(default_factory=dict)

    @property
    def rows(self) -> Tensor:
        """Logits [r, V] of the requested positions, for a forward over one sequence."""
        assert self.logits is not None
        return self.logits[0]


@dataclass(frozen=True, slots=True)
class Draft:
    """Draft for one sequence: a chain or a tree of proposed tokens.

    tokens: int64 [m], target ids on the target's device. The tokens of a chain are in text order.
    parents: For each node, the index of its parent in `tokens`. -1 means the root, which is the
        last committed token. Parents come before their children. None for a chain.
    draw_mode: How the tokens were chosen. "deterministic" unless they were drawn from `q`.
    q: float32 [m, V], the distribution over target ids that each token was drawn from. Siblings
        drawn without replacement all have the distribution of the first draw, because verification
        itself removes the earlier siblings.
    order: All nodes, in the order in which verification tests siblings. It must be the order in
        which they were drawn. None means the order of `tokens`.
    """

    tokens: Tensor
    parents: tuple[int, ...] | None = None
    draw_mode: DrawMode = "deterministic"
    q: Tensor | None = None
    order: tuple[int, ...] | None = None
    law: InitVar[str | None] = None

    def __post_init__(self, law: str | None) -> None:
        mode = self.draw_mode if law is None else law
        if mode in DRAW_MODES:
            object.__setattr__(self, "draw_mode", current_draw_mode(mode))

    @property
    def nodes(self) -> int:
        """Number of draft tokens."""
        return int(self.tokens.shape[0])

    @property
    def levels(self) -> int:
        """Number of tokens on the longest path of the draft."""
        if self.parents is None:
            return self.nodes
        depth = [0] * self.nodes
        for node, parent in enumerate(self.parents):
            depth[node] = 1 if parent < 0 else depth[parent] + 1
        return max(depth, default=0)


@dataclass(frozen=True, slots=True)
class Outcome:
    """Result of verifying a draft.

    path: Accepted nodes from the root down, as indices into `Draft.tokens`.
    committed: Token ids of these nodes, then the token that verification adds.
    origin: Origin of each committed token.
    tested: Number of levels that were verified, including the level of a rejected token.
    """

    path: tuple[int, ...]
    committed: tuple[int, ...]
    origin: tuple[Origin, ...]
    tested: int


@dataclass(slots=True)
class Forward:
    """One recorded forward. Times are in ns since the start of the timer.

    used: False if the result of the forward was discarded.
    share: Share of the model's weights that the forward read. 1 for a full forward
        (`Decoder.share`).
    rows: In a batch, the number of rows of each sequence, by the sequence's index in the batch.
        None for a sequence that is decoded alone.
    prompt_places: Indices in the batch of the sequences whose rows belong to their prompts.
    """

    model: str
    role: Role
    worker: int
    batch: int
    n_tokens: int
    layers: tuple[int, int]
    t0_ns: int
    t1_ns: int
    used: bool = True
    share: float = 1.0
    rows: Mapping[int, int] | None = None
    prompt_places: frozenset[int] = frozenset()


@dataclass(frozen=True, slots=True)
class SentMessage:
    """Message between workers.

    t0_ns, t1_ns: Times of sending and of reading, in ns since the start of the timer.
    """

    sender: int
    receiver: int
    t0_ns: int
    t1_ns: int
    nbytes: int


@dataclass(frozen=True, slots=True)
class Step:
    """One step of a method: a draft, its verification, and the committed tokens.

    draft: None if the method does not know its drafts, because another project's code decodes.
    outcome: What was committed, after the stop rule was applied.
    """

    seq: int
    draft: Draft | None
    outcome: Outcome
    forwards: Sequence[Forward] = ()
    extra: Mapping[str, Any] = field(default_factory=dict)

"""The engine's vocabulary: what goes into a forward, what a method proposes, what a step did.

Plain frozen dataclasses and nothing else; the terms are those of docs/reference/glossary.md.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import InitVar, dataclass, field
from typing import TYPE_CHECKING, Any, Literal, get_args

from specbench_cli.former_names import DRAW_MODES, current_draw_mode

if TYPE_CHECKING:
    from torch import Tensor

DrawMode = Literal["deterministic", "independent", "without_replacement"]
"""How draft tokens were chosen: not drawn at all, independently from q, or without replacement."""

Origin = Literal["prefill", "accepted", "recovered", "bonus", "plain", "relaxed"]
"""How a committed token came to be. accepted: drafted, and taken by the lossless rule. relaxed:
drafted, rejected by it, and let pass by a lossy accept rule."""

Guarantee = Literal["exact_tokens", "exact_law", "bounded", "quality_only", "workflow"]
"""What a method promises of its output, the strongest first; the first two are lossless."""

Rule = Literal["greedy", "rejection", "block", "coupled"]
"""How tokens are decided: argmax; rejection sampling, of single tokens or of whole blocks; argmax
of log-probability plus keyed noise."""

Role = Literal["prefill", "draft", "verify", "aux"]
"""What a forward was for."""

SublayerKind = Literal["attention", "mlp"]
SUBLAYERS: tuple[SublayerKind, ...] = get_args(SublayerKind)
"""Of a layer: what mixes rows, and what takes each by itself."""

Sublayer = tuple[int, SublayerKind]
"""A layer's number, and which of its sublayers."""

Skip = frozenset[int | Sublayer]
"""What a forward passes over: layers and sublayers. Rows go past them unchanged; a layer whose
attention is passed over writes no row."""


def expand_skip(skip: Skip) -> frozenset[Sublayer]:
    """The sublayers that a forward passes over, both of every layer that is named whole."""
    return frozenset(
        sublayer
        for each in skip
        for sublayer in ([(each, of) for of in SUBLAYERS] if isinstance(each, int) else [each])
    )


@dataclass(frozen=True, slots=True)
class Tokens:
    """Token ids, shape [b, n], int64, on the decoder's device."""

    ids: Tensor


@dataclass(frozen=True, slots=True)
class Hidden:
    """Input rows of layer `layers[0]`, to go on from an exit layer, shape [b, n, hidden]."""

    rows: Tensor


@dataclass(frozen=True, slots=True)
class Features:
    """What a draft head reads: token ids, shape [b, n], int64, and beside each the features of the
    token before it, shape [b, n, width]."""

    ids: Tensor
    rows: Tensor


Input = Tokens | Hidden | Features
"""What goes into a forward; which of them a decoder takes is its own."""


@dataclass(frozen=True, slots=True)
class ExtraInput:
    """What a model reads of a request beside its text; see `Decoder.attach`.

    ids: the input of an encoder.
    images: what an image processor makes of images ("pixel_values"), as the module's forward takes
        it; their places in the text hold the family's image token.
    """

    ids: tuple[int, ...] = ()
    images: Mapping[str, Tensor] = field(default_factory=dict)


@dataclass(frozen=True, slots=True)
class ModelOutput:
    """What a forward gives back.

    logits: [b, r, V] in the decoder's dtype, one row per requested position; None if none was
        asked.
    hidden: [b, n, hidden], the rows that leave the last computed layer (before the final norm).
    taps: layer index -> [b, n, hidden], the rows that leave that layer.
    """

    logits: Tensor | None
    hidden: Tensor
    aux_hidden_states: Mapping[int, Tensor] = field(default_factory=dict)

    @property
    def rows(self) -> Tensor:
        """The logits of a forward over one sequence that was asked for some, [r, V]."""
        assert self.logits is not None
        return self.logits[0]


@dataclass(frozen=True, slots=True)
class Draft:
    """Proposed continuations of one sequence.

    tokens: [m] int64, always TARGET ids, on the target's device; a chain's in their order.
    parents: index of each node's parent in `tokens`, -1 for the root (the last committed token); a
        parent comes before its children. None for a chain.
    draw_mode: how the tokens were chosen; "deterministic" unless each was drawn from its row of
        `q`.
    q: [m, V] float32, the distribution each token was drawn from, over target ids. Siblings drawn
        without replacement all have the distribution of the first draw: verification takes the
        earlier ones out.
    order: all nodes, in the order in which siblings are tested: that of their draws. None: as they
        are numbered.
    law: former name of `draw_mode`, with its former values.
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
        """Depth of the draft: the number of tokens of its longest path."""
        if self.parents is None:
            return self.nodes
        depth = [0] * self.nodes
        for node, parent in enumerate(self.parents):
            depth[node] = 1 if parent < 0 else depth[parent] + 1
        return max(depth, default=0)


@dataclass(frozen=True, slots=True)
class Outcome:
    """What verification decided.

    path: nodes that stand, accepted and relaxed ones, as indices into `Draft.tokens`, root side
        first.
    committed: their ids, then the recovered, bonus or plain one.
    origin: how each committed token came to be.
    tested: levels that verification reached, the rejected one included.
    """

    path: tuple[int, ...]
    committed: tuple[int, ...]
    origin: tuple[Origin, ...]
    tested: int


@dataclass(slots=True)
class Forward:
    """One metered forward. Times in ns since the timer's start; `used` is False for cancelled
    work.

    share: how much of the model's weights it read; 1 for a whole forward (`Decoder.share`).
    rows: of a batch, how many rows each sequence had in it, by its place; None for a sequence that
        is decoded alone.
    reading: of these, the places whose rows were of their prompts, beside others' rows of the
        forward's role.
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
    """A message from worker to worker: from when it was sent to when it was read. Times in ns since
    the timer's start."""

    sender: int
    receiver: int
    t0_ns: int
    t1_ns: int
    nbytes: int


@dataclass(frozen=True, slots=True)
class Step:
    """One verification whose result was committed from.

    draft is None where the method cannot say (peers); `outcome` is what was committed, after the
    cut.
    """

    seq: int
    draft: Draft | None
    outcome: Outcome
    forwards: Sequence[Forward] = ()
    extra: Mapping[str, Any] = field(default_factory=dict)

"""The contract of everything that can be run forward: target, draft and head alike."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Iterable, Sequence
from typing import Any, Literal, NamedTuple, Protocol

import torch
from torch import Tensor

from specbench_cli.engine.drafting.vocabulary import Translation
from specbench_cli.engine.types import (
    ExtraInput,
    Hidden,
    Input,
    ModelOutput,
    Skip,
    Tokens,
    expand_skip,
)
from specbench_cli.errors import MethodFault
from specbench_cli.former_names import renamed_members

LogitsAt = Literal["last", "all"] | Tensor | None
"""Which rows of the input get logits: the last, all, those of an index tensor [r], or none."""


class State(Protocol):
    """What a decoder remembers of its sequences. Capacity is fixed at creation.

    Rows are first *written* by a forward, then *committed*; `length` counts written rows. A row
    stands at a position of the text: its own number, unless rows before it were left out.

    Attributes:
        capacity: rows that there is room for in each sequence.
        by_row: whether it holds a row for each token, so that any last ones can be forgotten. What
            does not (recurrent models) returns to the end of an earlier forward: after `commit` or
            `rollback`, `length` may be less than was asked for, and what is missing is fed again.
    """

    capacity: int
    by_row: bool

    def length(self, seq: int = 0, layer: int = 0) -> int:
        """Rows written for a sequence at a layer."""

    def position(self, seq: int = 0) -> int:
        """Position of the next row: how many tokens of the text were fed."""

    def commit(self, seq: int, path: Sequence[int], loose: int = 0) -> None:
        """Keep, of the rows written since the last commit, those at `path` (indices, increasing);
        the next commit chooses among the last `loose` of them again."""

    def rollback(self, seq: int, n: int, layers: range | None = None) -> None:
        """Forget all rows from position n on."""

    def leave_out(self, seq: int, layers: Iterable[int], n: int) -> None:
        """Go on n places at some layers without rows there: none will ever be seen of them."""

    def clear(self) -> None:
        """Forget everything; keeps the memory."""

    @property
    def nbytes(self) -> int:
        """Bytes preallocated."""


class ModelInput(NamedTuple):
    """The input of one forward, or one sequence's share of a forward over several.

    Attributes:
        x: Token ids [b, n], or rows [b, n, hidden] that leave a layer, or both for a head. One line
            per sequence of `seqs`.
        state: State that the rows are appended to, after each sequence's written rows.
        positions: Position of each row, [b, n]. None means the next ones.
        mask: Which new row attends to which new row, [n, n] bool: a tree's ancestors, the row
            itself included. Rows written before are always attended to. None means causal. With
            more columns, [n, w + n], the first w are the last w rows written before, for a tree
            that is drafted level by level.
        logits_at: Rows that get logits. Ignored unless the last layer runs.
        place: Index of the sequence among those that are decoded together.
        prompt: True if `x` is part of a prompt.
        seqs: Sequences of `state` that the lines belong to. None means 0..b-1.
        layers: Half-open range of layers to run. None means all.
        skip: Layers and sublayers that are skipped.
        taps: Layers whose outgoing rows are captured.
    """

    x: Input
    state: State
    positions: Tensor | None = None
    mask: Tensor | None = None
    logits_at: LogitsAt = "last"
    place: int = 0
    prompt: bool = False
    seqs: Sequence[int] | None = None
    layers: tuple[int, int] | None = None
    skip: Skip = frozenset()
    taps: Sequence[int] = ()

    @property
    def shape(self) -> tuple[int, int]:
        """Number of sequences, and of new rows in each."""
        rows = self.x.ids if isinstance(self.x, Tokens) else self.x.rows
        return rows.shape[0], rows.shape[1]

    @property
    def whole(self) -> bool:
        """True if all layers run."""
        return self.layers is None and not self.skip

    @property
    def options(self) -> dict[str, Any]:
        """The keyword arguments of `Decoder.forward` that are not left at their defaults."""
        names = ("seqs", "positions", "mask", "layers", "skip", "logits_at", "taps")
        defaults = self._field_defaults
        given = {name: getattr(self, name) for name in names}
        return {name: value for name, value in given.items() if value is not defaults[name]}


Part = ModelInput
"""The name of `ModelInput` in `specbench_cli.api`, where a session makes the only ones."""


@renamed_members(parted="split_prompt", beside="extra_tokens", said="unembed_ids")
class Decoder(ABC):
    """A causal language model.

    Callers use `forward`. A subclass implements `execute`, which takes the arguments as one object,
    and a plug-in may override `forward` instead. The engine calls `run`, which chooses between
    them.

    Attributes:
        name: a short name for traces and messages ("target", "draft").
        vocab_size: width V of the logits.
        n_layers: number of layers L.
        max_positions: maximum number of positions.
        limit: Reason for a reduced `max_positions`, for messages; empty if it is not reduced.
        device, dtype: device and dtype of the computation.
        weight_bytes: bytes held by the weights, packed copies included.
        first: index in the text of the token that row 0 of a state holds.
        trees: True if new rows may be branches of a tree, with explicit positions and mask.
        translation: map from the target's vocabulary to a draft's. None if they are the same.
        input_vocab_size: Size of the vocabulary of the input ids. A draft's own vocabulary may
            be smaller.
        ran: number of forwards so far, for every caller. A trace with fewer forwards is incomplete.
        recorded: number of forwards recorded so far for replay (`graphs`).
    """

    name: str
    vocab_size: int
    n_layers: int
    hidden_size: int
    max_positions: int
    limit: str = ""
    device: torch.device
    dtype: torch.dtype
    weight_bytes: int
    first: int = 0
    trees: bool = True
    translation: Translation | None = None
    input_vocab_size: int = 0
    ran: int = 0
    recorded: int = 0

    def clamp_ids(self, ids: Tensor) -> Tensor:
        """Return the ids with those beyond this model's vocabulary replaced by its last id.

        The target may choose a padding id for which a draft with the same tokenizer has no
        embedding. The replacement only affects the draft tokens, not the output.
        """
        return (
            ids if self.input_vocab_size <= self.vocab_size else ids.clamp(max=self.vocab_size - 1)
        )

    @abstractmethod
    def new_state(self, capacity: int, n_seqs: int = 1) -> State:
        """A cleared state with room for `capacity` rows in each of `n_seqs` sequences."""

    def forward(
        self,
        x: Input,
        state: State,
        *,
        seqs: Sequence[int] | None = None,
        positions: Tensor | None = None,
        mask: Tensor | None = None,
        layers: tuple[int, int] | None = None,
        skip: Skip = frozenset(),
        logits_at: LogitsAt = "last",
        taps: Sequence[int] = (),
    ) -> ModelOutput:
        """Append the rows of `x` to `state` and run them through the layers; see `ModelInput`.

        Raises:
            ValueError: there are more rows than the state has capacity for.
            ChainsOnly: the model does not support the input's tree or layers.
        """
        return self.execute(
            ModelInput(
                x,
                state,
                positions=positions,
                mask=mask,
                logits_at=logits_at,
                seqs=seqs,
                layers=layers,
                skip=skip,
                taps=taps,
            )
        )

    def execute(self, model_input: ModelInput) -> ModelOutput:
        """Run a forward and add 1 to `ran`. Raise the same errors as `forward`."""
        raise NotImplementedError(f"{type(self).__name__} defines neither `execute` nor `forward`")

    def run(self, model_input: ModelInput) -> ModelOutput:
        """Run a forward by `forward` if a subclass overrides it, otherwise by `execute`."""
        if getattr(self.forward, "__func__", None) is Decoder.forward:
            return self.execute(model_input)
        return self.forward(model_input.x, model_input.state, **model_input.options)

    # What a request holds beside its text; a model of text alone does without.

    def split_prompt(self, ids: Sequence[int]) -> tuple[tuple[int, ...], ExtraInput | None]:
        """A prompt's ids as the text that this model goes on from, and what it reads beside it."""
        return tuple(ids), None

    def attach(self, state: State, source: ExtraInput, seq: int = 0) -> bool:
        """Have a sequence's first forward read what its request holds beside the text, if this
        model reads such; whether it does."""
        return False

    def extra_tokens(self, state: State, seq: int = 0) -> int:
        """Tokens that a sequence's next forward reads beside its rows: an encoder's."""
        return 0

    def forward_batch(
        self, parts: Sequence[ModelInput], *, taps: Sequence[int] = ()
    ) -> list[ModelOutput]:
        """One forward over new rows of several sequences, as many of each as it brings.

        Each has a state, a length, positions and a mask of its own. By default they go one after
        another, which costs what they cost alone. Counts as one.

        Returns:
            what `forward` gives for each part.
        """
        ran = self.ran + 1
        outs = [self.run(part._replace(taps=taps) if taps else part) for part in parts]
        self.ran = ran
        return outs

    def share(
        self, layers: tuple[int, int] | None = None, skip: Skip = frozenset(), logits: bool = True
    ) -> float:
        """How much of the weights a forward reads: 1 for a whole one with logits.

        Those of what it runs, and of the output matrix if it makes logits, over those of all; the
        embedding, of which a forward reads some rows, counts nowhere. By default all layers count
        the same, each sublayer half of that, and the output matrix nothing.

        Args:
            layers, skip: as of `forward`.
            logits: whether it makes some, whatever layer it ends at.
        """
        if layers is None and not skip and logits:
            return 1.0
        low, high = layers or (0, self.n_layers)
        over = sum(low <= layer < high for layer, _ in expand_skip(skip))
        return (high - low - over / 2) / self.n_layers

    # What heads need of a target; a decoder that is none may do without.

    def embed(self, ids: Tensor) -> Tensor:
        """Rows [..., hidden] that stand for token ids [...] before the first layer."""
        raise MethodFault(f"{self.name} does not give away its embeddings")

    def norm(self, rows: Tensor) -> Tensor:
        """The final norm of rows [..., hidden] that leave a layer: what `unembed` reads."""
        raise MethodFault(f"{self.name} does not give away its final norm")

    def unembed(self, rows: Tensor) -> Tensor:
        """Logits [..., V] of rows [..., hidden] that went through `norm`."""
        raise MethodFault(f"{self.name} does not give away its output matrix")

    def unembed_ids(self, rows: Tensor, ids: Tensor) -> Tensor | None:
        """`unembed` of some ids [k] alone, [..., k]; None where that would take all of them."""
        return None

    def remember(self, rows: Tensor, state: State, layers: range, positions: Tensor) -> None:
        """Append to layers that rows [1, n, hidden] did not go through the keys and values that
        they would have there, had they come to each as they are. Counts as one forward.

        By default each layer runs, and what leaves it is dropped.

        Args:
            positions: [1, n].
        """
        ran = self.ran + 1
        for at in layers:
            self.run(
                ModelInput(Hidden(rows), state, positions, logits_at=None, layers=(at, at + 1))
            )
        self.ran = ran

    def append_kv_share(self, layers: range) -> float:
        """How much of the weights `remember` reads; see `share`."""
        return self.share((layers.start, layers.stop), logits=False)

    def exits(self, rows: Tensor) -> Tensor:
        """Logits [..., V] of rows [..., hidden] that leave any layers, as if each were the last;
        adds 1 to `ran`: it is a forward through none."""
        self.ran += 1
        return self.unembed(self.norm(rows))


class ChainsOnly(MethodFault):
    """A method asks for what a model cannot do that runs whole forwards over chains alone."""


def trees_fault(decoder: Decoder) -> ChainsOnly:
    """What is told of branches to a model that takes none."""
    return ChainsOnly(
        f"a tree for {decoder.name}, which reads chains alone: its state has no rows that branches"
        " could share at positions of their own",
        "choose chains: a method that drafts one continuation (sps, pld)",
    )

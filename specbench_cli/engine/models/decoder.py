"""Base classes of decoders (target, draft model, draft head) and of their states.

A row is the hidden state of one token, or its keys and values in the state.
"""

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
    """State of a decoder's sequences, with a fixed capacity.

    A forward writes a row for each token, and `commit` keeps some of the rows. `length` is the
    number of written rows. The position of a row in the text is its row number, unless rows before
    it were dropped.

    Attributes:
        capacity: Maximum number of rows of each sequence.
        by_row: Whether the state has a row for each token, so that any number of tokens can be
            removed from the end. A recurrent state has not: it can only return to the end of an
            earlier forward. After `commit` or `rollback`, its `length` may be lower than requested,
            and the caller processes the missing tokens again.
    """

    capacity: int
    by_row: bool

    def length(self, seq: int = 0, layer: int = 0) -> int:
        """Return the number of rows written for a sequence at a layer."""

    def position(self, seq: int = 0) -> int:
        """Return the position of the next row: the number of tokens processed so far."""

    def commit(self, seq: int, path: Sequence[int], loose: int = 0) -> None:
        """Keep the rows at `path` of those written since the last commit, and drop the others.

        Args:
            path: Increasing indices, counted from the first row after the last commit.
            loose: Number of rows at the end of the path that the next commit may still drop.
        """

    def rollback(self, seq: int, n: int, layers: range | None = None) -> None:
        """Drop all rows from position n on."""

    def leave_out(self, seq: int, layers: Iterable[int], n: int) -> None:
        """Advance some layers by n positions without writing rows.

        Later rows do not attend to these positions in these layers.
        """

    def clear(self) -> None:
        """Drop all rows and keep the memory."""

    @property
    def nbytes(self) -> int:
        """Number of preallocated bytes."""


@renamed_members(taps="captured_layers", whole="runs_all_layers")
class ModelInput(NamedTuple):
    """The input of one forward, or one sequence's share of a forward over several.

    Attributes:
        x: Token ids [b, n] (`Tokens`), hidden states [b, n, hidden] that enter a later layer
            (`Hidden`), or both for a head (`Features`). b is the number of sequences in `seqs`.
        state: State that the new rows are appended to.
        positions: Position of each row, [b, n]. None means the next positions.
        mask: Which new row attends to which new row, [n, n] bool. For a tree these are the
            ancestors of a node and the node itself. Earlier rows are always visible. None means
            causal. If the mask has w more columns, [n, w + n], these come first and belong to the
            last w earlier rows, for a tree that is drafted level by level.
        logits_at: Rows that get logits. Ignored if the last layer does not run.
        place: Index of the sequence in its batch.
        prompt: True if `x` is part of a prompt.
        seqs: Indices in `state` of the b sequences. None means 0..b-1.
        layers: Half-open range of layers to run. None means all.
        skip: Layers and sublayers that are skipped.
        captured_layers: Layers whose output is captured.
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
    captured_layers: Sequence[int] = ()

    @property
    def shape(self) -> tuple[int, int]:
        """Number of sequences, and of new rows in each of them."""
        rows = self.x.ids if isinstance(self.x, Tokens) else self.x.rows
        return rows.shape[0], rows.shape[1]

    @property
    def runs_all_layers(self) -> bool:
        """True if all layers run."""
        return self.layers is None and not self.skip

    @property
    def options(self) -> dict[str, Any]:
        """Keyword arguments of `Decoder.forward` that differ from their defaults."""
        names = ("seqs", "positions", "mask", "layers", "skip", "logits_at", "captured_layers")
        defaults = self._field_defaults
        values = {name: getattr(self, name) for name in names}
        return {name: value for name, value in values.items() if value is not defaults[name]}


Part = ModelInput
"""Name of `ModelInput` in `specbench_cli.api`, where only sessions create instances."""


@renamed_members(
    parted="split_prompt",
    beside="extra_tokens",
    said="unembed_ids",
    remember="append_kv",
    exits="exit_logits",
)
class Decoder(ABC):
    """A causal language model.

    Methods call `forward`. A subclass implements `execute`, which takes the same arguments as one
    object. A plug-in may override `forward` instead. The engine calls `run`, which calls the one
    that the subclass defines.

    Attributes:
        name: Short name for traces and messages ("target", "draft").
        vocab_size: Width V of the logits.
        n_layers: Number of layers L.
        max_positions: Maximum context length in tokens.
        limit: Why `max_positions` is less than the config says, for messages. Empty if it is not.
        device, dtype: Device and dtype of the computation.
        weight_bytes: Bytes of the weights, including packed copies.
        first: Index in the text of the token of row 0: 0, or 1 for a head.
        trees: True if new rows may be branches of a tree, with explicit positions and mask.
        translation: Map between the target's vocabulary and a draft's. None if they are the same.
        input_vocab_size: Vocabulary size of the target, whose ids this decoder reads.
        ran: Number of forwards so far, whoever called them. The engine compares it with the trace.
        recorded: Number of CUDA graphs captured so far (`graphs`).
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

        A target may have padding ids for which a draft with the same tokenizer has no embedding.
        The replacement changes only draft tokens, not the output.
        """
        return (
            ids if self.input_vocab_size <= self.vocab_size else ids.clamp(max=self.vocab_size - 1)
        )

    @abstractmethod
    def new_state(self, capacity: int, n_seqs: int = 1) -> State:
        """Return an empty state with capacity for `capacity` rows in each of `n_seqs` sequences."""

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
        captured_layers: Sequence[int] = (),
    ) -> ModelOutput:
        """Run `x` through the layers and append its rows to `state`. See `ModelInput`.

        Raises:
            ValueError: The rows exceed the capacity of the state.
            ChainsOnly: The model does not support trees, or partial forwards.
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
                captured_layers=captured_layers,
            )
        )

    def execute(self, model_input: ModelInput) -> ModelOutput:
        """Run a forward and add 1 to `ran`. Raise the same errors as `forward`."""
        raise NotImplementedError(f"{type(self).__name__} defines neither `execute` nor `forward`")

    def run(self, model_input: ModelInput) -> ModelOutput:
        """Run a forward: call `forward` if a subclass overrides it, else `execute`."""
        if getattr(self.forward, "__func__", None) is Decoder.forward:
            return self.execute(model_input)
        return self.forward(model_input.x, model_input.state, **model_input.options)

    # Extra input of a request (encoder ids, images). Text-only models keep these defaults.

    def split_prompt(self, ids: Sequence[int]) -> tuple[tuple[int, ...], ExtraInput | None]:
        """Split a prompt into the ids that the decoder continues, and the extra input.

        A model with an encoder reads the prompt as extra input.
        """
        return tuple(ids), None

    def attach(self, state: State, source: ExtraInput, seq: int = 0) -> bool:
        """Attach extra input, which the sequence's first forward reads.

        Return False if this model does not support it.
        """
        return False

    def extra_tokens(self, state: State, seq: int = 0) -> int:
        """Return the number of extra tokens, e.g. of an encoder, in a sequence's next forward."""
        return 0

    def forward_batch(
        self, parts: Sequence[ModelInput], *, captured_layers: Sequence[int] = ()
    ) -> list[ModelOutput]:
        """Run one forward over new rows of several sequences.

        Each sequence has its own state, number of rows, positions and mask. By default the
        sequences run one after another, which saves no time. In `ran` it counts as one forward.

        Returns:
            The output of `forward` for each part.
        """
        ran = self.ran + 1
        outs = [
            self.run(part._replace(captured_layers=captured_layers) if captured_layers else part)
            for part in parts
        ]
        self.ran = ran
        return outs

    def share(
        self, layers: tuple[int, int] | None = None, skip: Skip = frozenset(), logits: bool = True
    ) -> float:
        """Return the share of the weights that a forward reads: 1 if all layers run, with logits.

        It is the share of the layers that run, and of the output matrix if there are logits. The
        embedding does not count, because a forward reads only a few of its rows. This default
        assumes layers of equal size, counts a sublayer as half a layer, and ignores the output
        matrix.

        Args:
            layers, skip: As in `forward`.
            logits: Whether the forward computes logits, at any last layer.
        """
        if layers is None and not skip and logits:
            return 1.0
        low, high = layers or (0, self.n_layers)
        over = sum(low <= layer < high for layer, _ in expand_skip(skip))
        return (high - low - over / 2) / self.n_layers

    # Draft heads call these methods of the target. Other decoders need not implement them.

    def embed(self, ids: Tensor) -> Tensor:
        """Return the embeddings [..., hidden] of token ids [...]."""
        raise MethodFault(f"{self.name} does not provide its embeddings")

    def norm(self, rows: Tensor) -> Tensor:
        """Apply the final norm to the output [..., hidden] of a layer, for `unembed`."""
        raise MethodFault(f"{self.name} does not provide its final norm")

    def unembed(self, rows: Tensor) -> Tensor:
        """Return the logits [..., V] of normed rows [..., hidden]."""
        raise MethodFault(f"{self.name} does not provide its output matrix")

    def unembed_ids(self, rows: Tensor, ids: Tensor) -> Tensor | None:
        """Return the logits [..., k] of only the ids [k]. None if the model must compute all
        logits."""
        return None

    def append_kv(self, rows: Tensor, state: State, layers: range, positions: Tensor) -> None:
        """Append keys and values to the cache of layers that a forward skipped.

        Early-exit methods use it. Each layer computes its keys and values from the same hidden
        states. In `ran` it counts as one forward. By default each layer runs completely, and its
        output is dropped.

        Args:
            rows: Hidden states [1, n, hidden].
            positions: [1, n].
        """
        ran = self.ran + 1
        for at in layers:
            self.run(
                ModelInput(Hidden(rows), state, positions, logits_at=None, layers=(at, at + 1))
            )
        self.ran = ran

    def append_kv_share(self, layers: range) -> float:
        """Return the share of the weights that `append_kv` reads; see `share`."""
        return self.share((layers.start, layers.stop), logits=False)

    def exit_logits(self, rows: Tensor) -> Tensor:
        """Return the logits [..., V] of an early exit, from the output [..., hidden] of a layer.

        The layer is treated as the last one. It adds 1 to `ran`.
        """
        self.ran += 1
        return self.unembed(self.norm(rows))


class ChainsOnly(MethodFault):
    """The method uses trees or partial forwards, which the model does not support."""


def trees_fault(decoder: Decoder) -> ChainsOnly:
    """Return the error for a tree draft with a decoder that supports only chains."""
    return ChainsOnly(
        f"{decoder.name} supports only chains, not trees: branches cannot share its state",
        "choose a method that drafts chains (sps, pld)",
    )

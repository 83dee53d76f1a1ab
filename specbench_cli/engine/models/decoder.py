"""Base classes of decoders (target, draft model, draft head) and of their states.

A row is the hidden state of one token, or the keys and values of the token in the state.
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
    """State of a decoder's sequences (such as a KV cache), with a fixed capacity.

    A forward writes a row for each token, and `commit` keeps some of these rows. `length` is the
    number of written rows. The position of a token in the text is its row number, unless earlier
    rows were dropped.

    Attributes:
        capacity: Maximum number of rows of each sequence.
        by_row: True if the state has a row for each token, so that any number of tokens can be
            removed from the end. A recurrent state has False: it can only return to the end of an
            earlier forward. After `commit` or `rollback`, its `length` may then be lower than
            requested. In that case the caller processes the missing tokens again.
    """

    capacity: int
    by_row: bool

    def length(self, seq: int = 0, layer: int = 0) -> int:
        """Return the number of rows that a sequence has written at a layer."""

    def position(self, seq: int = 0) -> int:
        """Return the position of the next token: the number of tokens processed so far."""

    def commit(self, seq: int, path: Sequence[int], loose: int = 0) -> None:
        """Keep the rows at `path` and drop all other rows written since the last commit.

        Args:
            path: Increasing indices, counted from the first row after the last commit.
            loose: Number of rows at the end of the path that the next commit may still drop.
        """

    def rollback(self, seq: int, n: int, layers: range | None = None) -> None:
        """Drop all rows of a sequence from position n on."""

    def leave_out(self, seq: int, layers: Iterable[int], n: int) -> None:
        """Advance some layers by n positions without writing rows.

        In these layers, later rows do not attend to the n positions.
        """

    def clear(self) -> None:
        """Drop all rows of all sequences, and keep the memory."""

    @property
    def nbytes(self) -> int:
        """Number of preallocated bytes."""


@renamed_members(taps="captured_layers", whole="runs_all_layers")
class ModelInput(NamedTuple):
    """The input of one forward, or one sequence's part of a forward over several sequences.

    Attributes:
        x: Token ids [b, n] (`Tokens`), hidden states [b, n, hidden] that enter a later layer
            (`Hidden`), or both for a head (`Features`). b is the number of sequences in `seqs`.
        state: State that the new rows are appended to.
        positions: Position of each row, [b, n]. None means consecutive positions after the last
            row.
        mask: Bool mask [n, n]: which new row attends to which new row. In a tree, a node attends to
            its ancestors and itself. All earlier rows are visible. None means a causal mask. A mask
            [n, w + n] also covers the last w earlier rows, in its first w columns. Trees that are
            drafted level by level use it.
        logits_at: Rows that get logits. Ignored if the last layer does not run.
        place: Index of the sequence in its batch.
        prompt: True if `x` is part of a prompt.
        seqs: Indices in `state` of the b sequences. None means 0 to b - 1.
        layers: Half-open range of layers to run. None means all layers.
        skip: Layers and sublayers that the forward skips.
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
        """Number of sequences, and number of new rows in each sequence."""
        rows = self.x.ids if isinstance(self.x, Tokens) else self.x.rows
        return rows.shape[0], rows.shape[1]

    @property
    def runs_all_layers(self) -> bool:
        """True if the forward runs all layers and skips none."""
        return self.layers is None and not self.skip

    @property
    def options(self) -> dict[str, Any]:
        """Arguments of `Decoder.forward` in this input that differ from the defaults."""
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
    object. A plug-in may override `forward` instead. The engine calls `run`, which then calls
    `forward` or `execute`.

    Attributes:
        name: Short name for traces and messages ("target", "draft").
        vocab_size: Number V of logits per token.
        n_layers: Number L of layers.
        max_positions: Maximum context length in tokens.
        limit: Reason why `max_positions` is less than the config allows, for messages. Empty if it
            is not less.
        device, dtype: Device and dtype of the computation.
        weight_bytes: Size of the weights in bytes, including packed copies.
        first: Index in the text of the token that row 0 belongs to: 0, or 1 for a head.
        trees: True if new rows may be branches of a tree, with explicit positions and mask.
        translation: Map between the target's vocabulary and a draft model's vocabulary. None if
            both are the same.
        input_vocab_size: Size of the target's vocabulary. This decoder reads ids of that
            vocabulary.
        ran: Number of forwards so far, of all callers. The engine compares it with the trace.
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
        """Replace ids beyond this model's vocabulary by the last id of the vocabulary.

        A target may have padding ids that a draft model with the same tokenizer does not have. The
        replacement can change draft tokens, but not the output.
        """
        return (
            ids if self.input_vocab_size <= self.vocab_size else ids.clamp(max=self.vocab_size - 1)
        )

    @abstractmethod
    def new_state(self, capacity: int, n_seqs: int = 1) -> State:
        """Return an empty state for `n_seqs` sequences, with space for `capacity` rows in each."""

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
        """Run `x` through the layers and append its rows to `state`. `ModelInput` describes the
        arguments.

        Raises:
            ValueError: The rows exceed the capacity of the state.
            ChainsOnly: The model does not support trees, or does not support running only some
                layers.
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
        """Run a forward and increase `ran` by 1. Raise the same errors as `forward`."""
        raise NotImplementedError(f"{type(self).__name__} defines neither `execute` nor `forward`")

    def run(self, model_input: ModelInput) -> ModelOutput:
        """Run a forward. Call `forward` if a subclass overrides it, otherwise `execute`."""
        if getattr(self.forward, "__func__", None) is Decoder.forward:
            return self.execute(model_input)
        return self.forward(model_input.x, model_input.state, **model_input.options)

    # The next functions handle extra input of a request (encoder ids, images). Text-only models
    # keep these defaults.

    def split_prompt(self, ids: Sequence[int]) -> tuple[tuple[int, ...], ExtraInput | None]:
        """Split a prompt into the ids that the decoder continues, and the extra input.

        A model with an encoder reads the prompt as extra input.
        """
        return tuple(ids), None

    def attach(self, state: State, source: ExtraInput, seq: int = 0) -> bool:
        """Attach extra input to a sequence. The sequence's first forward reads it.

        Return False if this model does not support extra input.
        """
        return False

    def extra_tokens(self, state: State, seq: int = 0) -> int:
        """Return the number of extra tokens (e.g. encoder tokens) in a sequence's next forward."""
        return 0

    def forward_batch(
        self, parts: Sequence[ModelInput], *, captured_layers: Sequence[int] = ()
    ) -> list[ModelOutput]:
        """Run one forward over new rows of several sequences.

        Each sequence has its own state, number of rows, positions and mask. By default the
        sequences run one after another, which saves no time. `ran` counts the call as one forward.

        Returns:
            For each sequence, the output that `forward` would return.
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
        """Return the share of the weights that a forward reads. 1 means all layers and logits.

        The share counts the layers that run, and the output matrix if the forward computes logits.
        The embedding does not count, because a forward reads only a few of its rows. This default
        assumes layers of equal size, counts a sublayer as half a layer, and ignores the output
        matrix.

        Args:
            layers, skip: Layers to run and layers to skip, as in `forward`.
            logits: Whether the forward computes logits, after the last layer that it runs.
        """
        if layers is None and not skip and logits:
            return 1.0
        low, high = layers or (0, self.n_layers)
        over = sum(low <= layer < high for layer, _ in expand_skip(skip))
        return (high - low - over / 2) / self.n_layers

    # Draft heads call the following functions of the target. Other decoders need not implement
    # them.

    def embed(self, ids: Tensor) -> Tensor:
        """Return the embeddings [..., hidden] of token ids [...]."""
        raise MethodFault(f"{self.name} does not provide its embeddings")

    def norm(self, rows: Tensor) -> Tensor:
        """Apply the final norm to the output [..., hidden] of a layer.

        `unembed` needs the result.
        """
        raise MethodFault(f"{self.name} does not provide its final norm")

    def unembed(self, rows: Tensor) -> Tensor:
        """Return the logits [..., V] of hidden states [..., hidden] to which the final norm was
        applied.
        """
        raise MethodFault(f"{self.name} does not provide its output matrix")

    def unembed_ids(self, rows: Tensor, ids: Tensor) -> Tensor | None:
        """Return the logits [..., k] of only the ids [k].

        Return None if the model can only compute all logits.
        """
        return None

    def append_kv(self, rows: Tensor, state: State, layers: range, positions: Tensor) -> None:
        """Append keys and values to the KV cache of layers that a forward skipped.

        Early-exit methods use it. Each layer computes its keys and values from the same hidden
        states. `ran` counts the call as one forward. By default, each layer runs completely and its
        output is dropped.

        Args:
            rows: Hidden states [1, n, hidden].
            positions: Positions [1, n].
        """
        ran = self.ran + 1
        for at in layers:
            self.run(
                ModelInput(Hidden(rows), state, positions, logits_at=None, layers=(at, at + 1))
            )
        self.ran = ran

    def append_kv_share(self, layers: range) -> float:
        """Return the share of the weights that `append_kv` reads. `share` defines this share."""
        return self.share((layers.start, layers.stop), logits=False)

    def exit_logits(self, rows: Tensor) -> Tensor:
        """Return the logits [..., V] of an early exit, from a layer's output [..., hidden].

        The function treats the layer as the last layer. It increases `ran` by 1.
        """
        self.ran += 1
        return self.unembed(self.norm(rows))


class ChainsOnly(MethodFault):
    """Error: the method uses trees or runs only some layers, and the model does not
    support this."""


def trees_fault(decoder: Decoder) -> ChainsOnly:
    """Return the error for a draft tree with a decoder that supports only chains."""
    return ChainsOnly(
        f"{decoder.name} supports only chains, not trees: branches cannot share its state",
        "choose a method that drafts chains (sps, pld)",
    )

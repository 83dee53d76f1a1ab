"""Draft heads that decode with the torch module used in training."""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Mapping
from pathlib import Path
from typing import ClassVar, Self

import torch
from torch import Tensor

from methods._heads.files import LoadedHead, read_head
from methods._heads.module import DraftHead
from methods._heads.module import HeadOutput as Said
from methods._heads.slots import HeadInput, PastKeyValues
from specbench_cli.api import (
    Artifact,
    Decoder,
    Features,
    Head,
    KVState,
    LayerShape,
    ModelInput,
    ModelOutput,
    State,
    scatter_logits,
)


class TwoStepHead(DraftHead):
    """`DraftHead` whose first step differs from later steps, and which is not a `JoinedHead`.

    Attributes:
        hidden_widths: Width of `HeadOutput.hidden`, in units of the target's width.
        lookback: Number of previous rows of the text that a new row, or a draft, reads.
    """

    hidden_widths: ClassVar[int]
    lookback: ClassVar[int]

    @abstractmethod
    def project_context(
        self, embedded: Tensor, features: Tensor, places: Tensor
    ) -> tuple[Tensor, Tensor]:
        """Return keys and values of a text's rows [sequences, n, width] at their positions."""

    @abstractmethod
    def draft_first(self, x: HeadInput) -> Said:
        """Draft from slots of the text, whose keys and values are in `x.past`."""

    @abstractmethod
    def draft_next(self, x: HeadInput) -> Said:
        """Draft from drafted tokens, with the output of the step before."""

    def forward(self, x: HeadInput) -> Said:
        """See `DraftHead.forward`."""
        if x.slots is None:
            return self.draft_next(x)
        x.past.text = self.project_context(x.embedded, x.features, x.positions)
        return self.draft_first(x)


class UnfusedHead(Head, Artifact):
    """`DraftHead` as a decoder, with KV entries for tokens of the text only.

    Keys and values of drafted tokens are part of the output that is passed to their children. Rows
    of the target's feature width belong to the text. Rows of the head's own output
    (`HeadOutput.hidden`) are wider.

    The first layer of the state contains keys and values of the text's rows. The second contains
    the inputs: embeddings as keys and features as values.

    Args:
        module: Module that computes, on the target's device and in its dtype.
    """

    module: ClassVar[type[TwoStepHead]]
    head: TwoStepHead
    n_layers = 2

    def __init__(self, module: TwoStepHead, target: Decoder) -> None:
        self.head = module.to(target.device, target.dtype).requires_grad_(False).eval()
        self.target, self.name, self.captured_layers = target, self.kind, module.captured_layers
        self.device, self.dtype = target.device, target.dtype
        self.vocab_size, self.hidden_size = target.vocab_size, target.hidden_size
        self.max_positions = target.max_positions
        self.weight_bytes = sum(each.nbytes for each in module.parameters())
        shape = module.shape
        self._heads, self._head_dim = shape.num_attention_heads, shape.head_dim

    def draft_first(self, x: HeadInput) -> Said:
        """Draft from the slots of the newest rows. `x.past` covers the whole text."""
        return self.head.draft_first(x)

    def draft_next(self, x: HeadInput) -> Said:
        """Draft from drafted nodes. The position of each is that of its parent's last row."""
        return self.head.draft_next(x)

    @classmethod
    def load(cls, folder: Path, decoders: Mapping[str, Decoder]) -> Self:
        """Load the head in a folder; see `Artifact.load`."""
        target = decoders["target"]
        files = read_head(folder, cls.kind, cls.module.layouts)
        files.check_target(target)
        return cls.from_files(files, target)

    @classmethod
    def from_files(cls, files: LoadedHead, target: Decoder) -> Self:
        """Return the head of these files.

        Raises:
            EnvironmentFault: The head does not match the target.
        """
        return cls(cls.module.from_files(files, target), target)

    @classmethod
    def random(cls, decoders: Mapping[str, Decoder], seed: int = 0) -> Self:
        """Return a head with random weights; see `Artifact.random`."""
        target = decoders["target"]
        return cls(cls.module.random(target, seed), target)

    def new_state(self, capacity: int, n_seqs: int = 1) -> State:
        """See `Decoder`."""
        shapes = [
            LayerShape(self._heads, self._head_dim, self._head_dim),
            LayerShape(1, self.hidden_size, self.hidden_size),
        ]
        return KVState(shapes, n_seqs, capacity, dtype=self.dtype, device=self.device)

    @torch.inference_mode()
    def execute(self, model_input: ModelInput) -> ModelOutput:
        """See `Decoder.execute`, for one sequence.

        Positions and mask of drafted rows are not read, because both follow from the parents'
        output.
        """
        x, state, logits_at = model_input.x, model_input.state, model_input.logits_at
        assert isinstance(x, Features)
        assert isinstance(state, KVState)
        self.ran += 1
        embedded = self.target.embed(x.ids)
        if x.rows.shape[-1] == self.hidden_size * len(self.captured_layers):
            n, first = x.ids.shape[1], state.length()
            self._write(state, embedded, x.rows)
            n_logits = n if logits_at == "all" else 1
            places = torch.arange(first + n, device=self.device)[None]
            visible = places[..., None, :] <= places[:, -n_logits:, None]
            past = PastKeyValues(visible[:, None], self._text_kv(state, first + n))
            read = self._read(state, first + n - n_logits)
            slots = torch.arange(read[0].shape[1] - n_logits, read[0].shape[1], device=self.device)
            out = self.draft_first(HeadInput(*read, past, slots[None]))
        else:
            out, past = self._draft_on(embedded, x.rows, state)
        hidden = [out.hidden]
        hidden += [part.transpose(1, 2).flatten(2) for pair in past.own for part in pair]
        return ModelOutput(self.unembed(out.normed), torch.cat(hidden, -1))

    def unembed(self, rows: Tensor) -> Tensor:
        """See `Decoder`. Uses the target's output matrix. Ids that the head cannot draft get
        -inf."""
        logits, says = self.target.unembed(rows), self.head.says
        if says is None:
            return logits
        return scatter_logits(logits.index_select(-1, says), says, logits.shape[-1])

    def _write(self, state: KVState, embedded: Tensor, features: Tensor) -> None:
        """Write rows of the text to the state."""
        n, first = embedded.shape[1], state.length()
        state.require(first, n)
        new = slice(first, first + n)
        state.keys(1)[:, :, new], state.values(1)[:, :, new] = embedded[:, None], features[:, None]
        state.extend(0, range(2), n)
        keys, values = self.head.project_context(*self._read(state, first))
        state.keys(0)[:, :, new], state.values(0)[:, :, new] = keys[:, :, -n:], values[:, :, -n:]

    def _read(self, state: KVState, since: int) -> tuple[Tensor, Tensor, Tensor]:
        """Return embeddings and features from row `since` on, and from `lookback` rows before it.

        They are [1, n, width] each, with their positions [1, n].
        """
        rows = slice(max(0, since - self.head.lookback), state.length())
        embedded, features = state.keys(1)[:, 0, rows], state.values(1)[:, 0, rows]
        return embedded, features, torch.arange(rows.start, rows.stop, device=self.device)[None]

    def _text_kv(self, state: KVState, n: int) -> tuple[Tensor, Tensor]:
        return state.keys(0)[:, :, :n], state.values(0)[:, :, :n]

    def _draft_on(
        self, embedded: Tensor, rows: Tensor, state: KVState
    ) -> tuple[Said, PastKeyValues]:
        """Continue a draft from `HeadOutput.hidden` and the keys and values of each level."""
        n, size, own = rows.shape[1], state.length(), self.head.hidden_widths * self.hidden_size
        parts = rows[..., own:].unflatten(-1, (-1, self._heads, self._head_dim))
        pairs = [part.transpose(1, 2) for part in parts.unbind(2)]
        visible = torch.ones(1, 1, n, size, dtype=torch.bool, device=self.device)
        past = PastKeyValues(visible, self._text_kv(state, size))
        past.own += list(zip(pairs[::2], pairs[1::2], strict=True))
        places = torch.full((1, n), size - 1 + len(past.own), device=self.device)
        return self.draft_next(HeadInput(embedded, rows[..., :own], places, past)), past

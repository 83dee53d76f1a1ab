"""Base classes of draft heads that decode with the same torch module as in training.

Chimera and Falcon use these classes, because their first draft step differs from later steps.
`methods/_heads/layer.py` contains the base classes of heads with fused layers.
"""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Mapping
from pathlib import Path
from typing import ClassVar, Self

import torch
from torch import Tensor

from methods._heads.files import LoadedHead, read_head
from methods._heads.module import DraftHead, HeadOutput
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
    """`DraftHead` whose first draft step differs from later steps.

    Attributes:
        hidden_widths: Width of `HeadOutput.hidden`, in multiples of the target's hidden size.
        lookback: Number of previous tokens of the text whose embeddings and features the head needs
            for one token.
    """

    hidden_widths: ClassVar[int]
    lookback: ClassVar[int]

    @abstractmethod
    def project_context(
        self, embedded: Tensor, features: Tensor, positions: Tensor
    ) -> tuple[Tensor, Tensor]:
        """Return the keys and values of the text. Slots attend to them.

        Args:
            embedded: Token embeddings, [sequences, n, width].
            features: Features of the previous tokens, [sequences, n, width].
            positions: Positions, [sequences, n].
        """

    @abstractmethod
    def draft_first(self, x: HeadInput) -> HeadOutput:
        """Run the first draft step. `x.past` contains the keys and values of the text."""

    @abstractmethod
    def draft_next(self, x: HeadInput) -> HeadOutput:
        """Run a later draft step. `x.features` is the hidden output of the previous step."""

    def forward(self, x: HeadInput) -> HeadOutput:
        """Run the first or a later draft step. A later step has no slots in its input."""
        if x.slots is None:
            return self.draft_next(x)
        x.past.text = self.project_context(x.embedded, x.features, x.positions)
        return self.draft_first(x)


class UnfusedHead(Head, Artifact):
    """Draft head that decodes with the trained torch module itself (a `TwoStepHead`).

    The KV cache contains committed tokens only. The output row of a draft token contains the
    token's keys and values. The engine passes this row to the children of the token. The width of
    the input features tells the two cases apart. Rows of the target's width belong to committed
    tokens. Wider rows are this head's own output.

    The KV cache has two layers. Layer 0 contains the keys and values of the committed tokens. Layer
    1 contains the inputs of the head: embeddings in place of keys, features in place of values.

    Args:
        module: Trained torch module. It is moved to the target's device and dtype.
        target: Decoder that the head drafts for.
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

    def draft_first(self, x: HeadInput) -> HeadOutput:
        """Run the first draft step, after the committed tokens. Subclasses may override it."""
        return self.head.draft_first(x)

    def draft_next(self, x: HeadInput) -> HeadOutput:
        """Run a later draft step, for all nodes of one level of the draft tree.

        `x.positions` are the positions of the parents' features.
        """
        return self.head.draft_next(x)

    @classmethod
    def load(cls, folder: Path, decoders: Mapping[str, Decoder]) -> Self:
        """Load the head in a folder."""
        target = decoders["target"]
        files = read_head(folder, cls.kind, cls.module.layouts)
        files.check_target(target)
        return cls.from_files(files, target)

    @classmethod
    def from_files(cls, files: LoadedHead, target: Decoder) -> Self:
        """Create the head from loaded files.

        Raises:
            EnvironmentFault: The head does not match the target.
        """
        return cls(cls.module.from_files(files, target), target)

    @classmethod
    def random(cls, decoders: Mapping[str, Decoder], seed: int = 0) -> Self:
        """Return a head with random weights."""
        target = decoders["target"]
        return cls(cls.module.random(target, seed), target)

    def new_state(self, capacity: int, n_seqs: int = 1) -> State:
        """Return an empty KV cache.

        Layer 0 contains keys and values, layer 1 the inputs of the head.
        """
        shapes = [
            LayerShape(self._heads, self._head_dim, self._head_dim),
            LayerShape(1, self.hidden_size, self.hidden_size),
        ]
        return KVState(shapes, n_seqs, capacity, dtype=self.dtype, device=self.device)

    @torch.inference_mode()
    def execute(self, model_input: ModelInput) -> ModelOutput:
        """Run the head on committed tokens or on one level of the draft tree, for one sequence.

        The positions and the mask of draft tokens are ignored. The output row of a parent contains
        all keys and values that its children attend to.
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
            positions = torch.arange(first + n, device=self.device)[None]
            visible = positions[..., None, :] <= positions[:, -n_logits:, None]
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
        """Return logits over the target's ids, computed with the target's output matrix.

        Ids outside the draft vocabulary get -inf.
        """
        logits, draft_ids = self.target.unembed(rows), self.head.draft_ids
        if draft_ids is None:
            return logits
        return scatter_logits(logits.index_select(-1, draft_ids), draft_ids, logits.shape[-1])

    def _write(self, state: KVState, embedded: Tensor, features: Tensor) -> None:
        """Add the inputs of committed tokens to layer 1 of the KV cache, and extend both layers."""
        n, first = embedded.shape[1], state.length()
        state.require(first, n)
        new = slice(first, first + n)
        state.keys(1)[:, :, new], state.values(1)[:, :, new] = embedded[:, None], features[:, None]
        state.extend(0, range(2), n)
        keys, values = self.head.project_context(*self._read(state, first))
        state.keys(0)[:, :, new], state.values(0)[:, :, new] = keys[:, :, -n:], values[:, :, -n:]

    def _read(self, state: KVState, since: int) -> tuple[Tensor, Tensor, Tensor]:
        """Return embeddings [1, n, width], features [1, n, width] and positions [1, n].

        The first row is `lookback` tokens before position `since`.
        """
        rows = slice(max(0, since - self.head.lookback), state.length())
        embedded, features = state.keys(1)[:, 0, rows], state.values(1)[:, 0, rows]
        return embedded, features, torch.arange(rows.start, rows.stop, device=self.device)[None]

    def _text_kv(self, state: KVState, n: int) -> tuple[Tensor, Tensor]:
        return state.keys(0)[:, :, :n], state.values(0)[:, :, :n]

    def _draft_on(
        self, embedded: Tensor, rows: Tensor, state: KVState
    ) -> tuple[HeadOutput, PastKeyValues]:
        """Run a later draft step.

        Each row of `rows` is the output row of a parent. It contains the parent's
        `HeadOutput.hidden`, and the keys and values of all draft tokens on its path.
        """
        n, size, own = rows.shape[1], state.length(), self.head.hidden_widths * self.hidden_size
        parts = rows[..., own:].unflatten(-1, (-1, self._heads, self._head_dim))
        pairs = [part.transpose(1, 2) for part in parts.unbind(2)]
        visible = torch.ones(1, 1, n, size, dtype=torch.bool, device=self.device)
        past = PastKeyValues(visible, self._text_kv(state, size))
        past.own += list(zip(pairs[::2], pairs[1::2], strict=True))
        positions = torch.full((1, n), size - 1 + len(past.own), device=self.device)
        return self.draft_next(HeadInput(embedded, rows[..., :own], positions, past)), past

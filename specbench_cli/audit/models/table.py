"""Table models: models so small that all outcomes of random decoding can be enumerated.

The logits of a row are an entry of the table, indexed by the previous token and its own token. With
a vocabulary of 3 to 5 tokens, the distribution of a few tokens has a few hundred outcomes.
"""

from __future__ import annotations

import copy
import math
from bisect import bisect_left
from collections.abc import Iterable, Sequence
from functools import lru_cache
from typing import Any, NamedTuple, cast

import torch
from torch import Tensor, nn

from specbench_cli.engine.models.decoder import Decoder, ModelInput, State, trees_fault
from specbench_cli.engine.models.state import RecurrentState
from specbench_cli.engine.types import Features, Hidden, ModelOutput, Tokens, expand_skip


class CachedRow(NamedTuple):
    """A row of a table's state.

    Attributes:
        id: token id.
        position: position at which the row was computed.
        parent: index of the previous row of its sequence or branch, -1 if none.
        features: features that a head read with the token.
        previous_id: id of the previous token, as a head derived it from the features.
    """

    id: int
    position: int
    parent: int
    features: Tensor | None = None
    previous_id: int = 0


PARENT_DROPPED = -2
"""Parent of a row whose previous row was dropped from the state."""


class TableState:
    """State of a table decoder: the rows that it read, and the number of rows of each layer.

    Attributes:
        misread: number of rows that were read at a wrong position or with wrong features.
    """

    by_row = True

    def __init__(self, capacity: int, n_layers: int = 1) -> None:
        self.capacity = capacity
        self.rows: list[CachedRow] = []
        self.lengths = [0] * n_layers
        self.kept = self.left_out = 0
        self.misread = 0

    @property
    def ids(self) -> list[int]:
        """Ids of the rows."""
        return [row.id for row in self.rows]

    @property
    def positions(self) -> list[int]:
        """Positions at which the rows were computed."""
        return [row.position for row in self.rows]

    def length(self, seq: int = 0, layer: int = 0) -> int:
        """See `State`."""
        return self.lengths[layer]

    def position(self, seq: int = 0) -> int:
        """See `State`."""
        return self.lengths[0] + self.left_out

    def select(self, rows: Sequence[int], seq: int = 0) -> None:
        """See `KVState.select`. Rows whose previous row is dropped get `PARENT_DROPPED`."""
        place = {row: at for at, row in enumerate(rows)}
        kept = [self.rows[row] for row in rows]
        self.left_out += len(self.rows) - len(kept)
        self.rows = [row._replace(parent=place.get(row.parent, PARENT_DROPPED)) for row in kept]
        self.lengths = [len(kept)] * len(self.lengths)
        self.kept = len(kept)

    def append(self, rows: Sequence[CachedRow], layers: Iterable[int] | None = None) -> None:
        """Append rows to all layers or to some of them.

        Raises:
            ValueError: the rows exceed the capacity.
        """
        start = len(self.rows)
        if start + len(rows) > self.capacity:
            raise ValueError(f"{len(rows)} rows do not fit behind {start} of {self.capacity}")
        self.rows.extend(rows)
        self.count_rows(len(rows), range(len(self.lengths)) if layers is None else layers)

    def count_rows(self, n: int, layers: Iterable[int]) -> None:
        """Add n to the number of rows of each of these layers."""
        for layer in layers:
            self.lengths[layer] += n

    def leave_out(self, seq: int, layers: Iterable[int], n: int) -> None:
        """See `State`. The logits of a table depend on the tokens only."""
        self.count_rows(n, layers)

    def commit(self, seq: int, path: Sequence[int], loose: int = 0) -> None:
        """See `State`."""
        written, base = self.rows[self.kept :], self.kept
        for at, row in enumerate(path, base):
            kept = written[row]
            self.rows[at] = kept if kept.parent == at - 1 else kept._replace(parent=at - 1)
        self.lengths = [base + bisect_left(path, length - base) for length in self.lengths]
        self.kept += len(path) - loose
        del self.rows[base + len(path) :]

    def rollback(self, seq: int, n: int, layers: range | None = None) -> None:
        """See `State`."""
        n = max(0, n - self.left_out)
        for layer in range(len(self.lengths)) if layers is None else layers:
            self.lengths[layer] = min(self.lengths[layer], n)
        del self.rows[max(self.lengths) :]
        self.kept = min(self.kept, len(self.rows))

    def clear(self) -> None:
        """See `State`."""
        self.left_out = 0
        self.rollback(0, 0)

    @property
    def nbytes(self) -> int:
        """See `State`."""
        return 24 * self.capacity


class TableDecoder(Decoder):
    """A decoder whose logits are entries of `table` [V, V, V], by the last two tokens.

    It takes the two tokens from its state, as a transformer attends to its KV cache. So an error of
    a method changes the logits: a stale or missing row, and a row at a wrong position, which counts
    as another token. The first row of a sequence has token 0 before it. In a tree, the parent of a
    row is the last row that its attention mask allows.

    Input rows without a state row belong to a `LookAhead` head. They are returned unchanged, or
    shifted if their position or mask is wrong. A text row must not attend to them.

    A layer whose attention is skipped ignores the previous token. A layer whose MLP is skipped
    ignores its own token.

    Args:
        exits: table of the output of the first layer, for early exits. Default: one layer only. In
            the second layer, a row with a wrong input counts as another token.
        inner: number of layers between the first and the last. Their output is that of the first.
            Methods may skip any set of their sublayers.

    Attributes:
        look_ahead_table: table of the look-ahead rows that enter the first layer.
    """

    reads: type[Tokens | Features] = Tokens
    module: TrainableTable
    look_ahead_table: Tensor

    def __init__(
        self, name: str, table: Tensor, exits: Tensor | None = None, inner: int = 0
    ) -> None:
        self.name = name
        self.table = table
        self.layers = (table,) if exits is None else (*(exits,) * (1 + inner), table)
        self.vocab_size = table.shape[-1]
        self.n_layers = len(self.layers)
        self.hidden_size = self.vocab_size  # hidden states are logits
        self.max_positions = 1 << 20
        self.device = table.device
        self.dtype = table.dtype
        self.weight_bytes = table.nbytes

    def new_state(self, capacity: int, n_seqs: int = 1) -> State:
        """See `Decoder`."""
        return TableState(capacity, self.n_layers)

    def execute(self, model_input: ModelInput) -> ModelOutput:
        """See `Decoder`. Only one sequence at a time."""
        x, state, logits_at = model_input.x, model_input.state, model_input.logits_at
        positions, mask, layers = model_input.positions, model_input.mask, model_input.layers
        skip, captured_layers = model_input.skip, model_input.captured_layers
        low, high = layers or (0, self.n_layers)
        if isinstance(x, Hidden) and not low and high == self.n_layers and positions is not None:
            return self._forward_embeddings(x.rows[0], state, positions[0], mask, captured_layers)
        self.ran += 1
        reads = Hidden if low else self.reads
        if not isinstance(x, reads) or not isinstance(state, TableState):
            raise ValueError(f"a {self.name} table reads {reads.__name__}, on its own states")
        skipped = expand_skip(skip) if skip else frozenset()
        every = range(low, high)
        run = [at for at in every if (at, "attention") not in skipped] if skipped else every
        start = state.length(0, run[0] if run else low)
        n = self._append(model_input, state, start, low, run)
        look_ahead = None
        if isinstance(x, Hidden) and x.rows.shape[1] > n:
            assert positions is not None
            look_ahead = _look_ahead_rows(x.rows[0, n:], mask, positions[0], state)
            if mask is not None:
                ahead = mask[:n, n:].any(-1)  # text rows that attend to look-ahead rows
                state.misread += int(ahead.sum())
                x = Hidden(x.rows[:, :n] + ahead[None, :, None])
            else:
                x = Hidden(x.rows[:, :n])
        rows = range(start, start + n)
        before = [self.previous_token(state, row) for row in rows]
        last = [self.read_token(state, row) for row in rows]
        if isinstance(x, Hidden):
            due = _rows(self.layers[low - 1], before, last)
            wrong = (x.rows[0] != due).any(-1).tolist()
            last = [(token + off) % self.vocab_size for token, off in zip(last, wrong, strict=True)]
        if not run and not isinstance(x, Hidden):
            del state.rows[-n:]  # no layer has these rows
        run_layers = (
            [at for at in every if at in run or (at, "mlp") not in skipped] if skipped else every
        )
        if not run_layers:
            hidden = x.rows if isinstance(x, Hidden) else self.embed(cast(Tokens, x).ids)
        else:
            before, last = self._apply_skips(before, last, skipped, run, low, run_layers[-1])
            hidden = _rows(self.layers[run_layers[-1]], before, last)[None]
        captured = {
            at: hidden if at == high - 1 else _rows(self.layers[at], before, last)[None]
            for at in captured_layers
        }
        if look_ahead is not None:
            hidden = torch.cat((hidden, look_ahead[None]), 1)
        if logits_at is None or high < self.n_layers:
            return ModelOutput(None, hidden, captured)
        if isinstance(logits_at, Tensor):
            return ModelOutput(hidden[:, logits_at], hidden, captured)
        return ModelOutput(hidden[:, -1:] if logits_at == "last" else hidden, hidden, captured)

    def _append(
        self, model_input: ModelInput, state: TableState, start: int, low: int, run: Sequence[int]
    ) -> int:
        """Append the input's rows to the state and return their number."""
        x, positions, mask = model_input.x, model_input.positions, model_input.mask
        if not isinstance(x, Tokens | Features):
            n = x.rows.shape[1] if not low else min(x.rows.shape[1], len(state.rows) - start)
            state.count_rows(n, run)
            return n
        n = x.ids.shape[1]
        first = start + state.left_out
        at = range(first, first + n) if positions is None else positions[0].tolist()
        parent = range(start - 1, start + n - 1) if mask is None else _parents(mask, start)
        features = x.rows[0] if isinstance(x, Features) else [None] * n
        fed = zip(x.ids[0].tolist(), at, parent, features, strict=True)
        state.append([CachedRow(*row) for row in fed], run)
        return n

    def _apply_skips(
        self,
        before: list[int],
        last: list[int],
        skipped: frozenset[tuple[int, str]],
        run: Sequence[int],
        low: int,
        layer: int,
    ) -> tuple[list[int], list[int]]:
        """Return the tokens that a layer reads. A skipped attention or MLP sublayer changes
        them.
        """
        if not low and any(at < layer for at, _ in skipped):
            last = [(token + 1) % self.vocab_size for token in last]
        if layer not in run:
            before = [0] * len(before)
        if (layer, "mlp") in skipped:
            last = [0] * len(last)
        return before, last

    def _forward_embeddings(
        self,
        rows: Tensor,
        state: State,
        positions: Tensor,
        mask: Tensor | None,
        captured_layers: Sequence[int],
    ) -> ModelOutput:
        """Run all layers over the embeddings [n, V] of text rows and, after them, look-ahead
        rows."""
        assert isinstance(state, TableState)
        n = int((rows >= 0).all(-1).sum())
        hidden, captured = rows[:0], dict[int, Tensor]()
        self.ran += not n
        if n:
            assert mask is not None
            ahead = mask[:n, n:].any(-1)  # text rows that attend to look-ahead rows
            state.misread += int(ahead.sum())
            ids = (rows[:n].argmax(-1) + ahead) % self.vocab_size
            out = self.forward(
                Tokens(ids[None]),
                state,
                positions=positions[None, :n],
                mask=mask[:n, :n],
                captured_layers=captured_layers,
            )
            hidden, captured = out.hidden[0], dict(out.aux_hidden_states)
        nodes = range(len(state.rows) - max(1, n), len(state.rows))
        each = (len(rows) - n) // len(nodes)
        ways = [
            continue_greedily(
                self.look_ahead_table,
                self.table,
                (self.previous_token(state, at), self.read_token(state, at)),
                each,
            )
            for at in nodes
        ]
        output = torch.cat((hidden, _look_ahead_rows(torch.cat(ways), mask, positions, state)))[
            None
        ]
        return ModelOutput(output, output, captured)

    def embed(self, ids: Tensor) -> Tensor:
        """See `Decoder`."""
        return torch.nn.functional.one_hot(ids, self.vocab_size).to(self.dtype)

    def norm(self, rows: Tensor) -> Tensor:
        """See `Decoder`. Returns the rows unchanged."""
        return rows

    def unembed(self, rows: Tensor) -> Tensor:
        """See `Decoder`. Returns the rows unchanged."""
        return rows

    def unembed_ids(self, rows: Tensor, ids: Tensor) -> Tensor:
        """See `Decoder`. Returns the logits of the ids."""
        return rows[..., ids]

    def trainable(self) -> TableDecoder:
        """Return a copy with a trainable `module`, whose weights `publish` copies to the table."""
        made = copy.copy(self)
        made.module = TrainableTable(self.table)
        made.publish()
        return made

    def publish(self) -> None:
        """Copy the module's current weights into the table."""
        self.table = self.module.table.detach().clone()
        self.layers = (*self.layers[:-1], self.table)

    def previous_token(self, state: TableState, row: int) -> int:
        """Return the id of the token before a row's token in its sequence or branch."""
        return self.read_token(state, state.rows[row].parent)

    def read_token(self, state: TableState, row: int) -> int:
        """Return the id of a row's token. If the row has a wrong position, return another id."""
        if row < 0:
            return 0
        cached = state.rows[row]
        parent = cached.parent
        if parent == PARENT_DROPPED:
            return cached.id
        due = 0 if parent < 0 else state.rows[parent].position + 1
        state.misread += cached.position != due
        return (cached.id + cached.position - due) % self.vocab_size


class RecurrentTableState(RecurrentState):
    """State of a recurrent table model: all rows that the model processed."""

    left_out = 0

    @property
    def rows(self) -> Sequence[CachedRow]:
        """Return all rows."""
        return self.latest_cache(0) or ()

    @property
    def ids(self) -> list[int]:
        """Ids of the rows."""
        return [row.id for row in self.rows]

    @property
    def positions(self) -> list[int]:
        """Positions at which the rows were computed."""
        return [row.position for row in self.rows]

    @property
    def lengths(self) -> list[int]:
        """Number of rows by layer, as in `TableState`."""
        return [self.length()]


class RecurrentTable(TableDecoder):
    """A table model with a recurrent state. The state can be rolled back only to the end of a
    forward.
    """

    trees = False

    def new_state(self, capacity: int, n_seqs: int = 1) -> RecurrentState:
        """See `Decoder`."""
        return RecurrentTableState(n_seqs, capacity)

    def execute(self, model_input: ModelInput) -> ModelOutput:
        """Run a forward over a chain of tokens. Trees and partial forwards are rejected."""
        state, layers = model_input.state, model_input.layers
        if model_input.mask is not None or layers not in (None, (0, self.n_layers)):
            raise trees_fault(self)
        assert isinstance(state, RecurrentTableState)
        read = TableState(state.capacity, self.n_layers)
        read.append(state.rows)
        out = super().execute(model_input._replace(state=read))
        state.write(0, len(read.rows) - len(state.rows), tuple(read.rows))
        return out


class TrainableTable(nn.Module):
    """A table as a torch module, with the interface of transformers' models."""

    def __init__(self, table: Tensor) -> None:
        super().__init__()
        self.table = nn.Parameter(table.clone())

    def forward(self, input_ids: Tensor) -> ModelOutput:
        """Return the logits [b, n, V] after each of the ids [b, n]."""
        before = nn.functional.pad(input_ids[:, :-1], (1, 0))
        rows = self.table[before, input_ids]
        return ModelOutput(rows, rows)


def _rows(table: Tensor, before: Sequence[int], last: Sequence[int]) -> Tensor:
    """Return entries [n, V] of a table, by the token before and the last token of each text.

    NumPy is used because it looks them up twice as fast as torch.
    """
    return torch.from_numpy(table.numpy()[before, last])


def continue_greedily(
    draft: Tensor, target: Tensor, tokens: tuple[int, int], levels: int
) -> Tensor:
    """Return the draft's logits [levels, V] for the tokens after the target's greedy token.

    Each level continues with the draft's own greedy token.

    Args:
        draft: table of the draft.
        target: table of the target.
        tokens: the last two tokens of the text.
    """
    last, token = tokens[1], int(target[tokens].argmax())
    way: list[Tensor] = []
    for _ in range(levels):
        way.append(draft[last, token])
        last, token = token, int(way[-1].argmax())
    return torch.stack(way)


def _look_ahead_rows(
    rows: Tensor, mask: Tensor | None, positions: Tensor, state: TableState
) -> Tensor:
    """Return the output of look-ahead rows [e, V]. Rows with a wrong mask or position are shifted.

    `mask` and `positions` belong to the text rows and, after them, the look-ahead rows. Look-ahead
    rows form chains of equal length, one after each of some text rows. Without a mask they form one
    chain after the last text row.
    """
    if mask is None:
        mask = torch.ones(len(rows) + 1, len(rows) + 1, dtype=torch.bool).tril()
        positions = torch.cat((torch.tensor([state.rows[-1].position]), positions))
    n = len(mask) - len(rows)
    due, left = mask.new_zeros(len(rows), len(mask)), rows.clone()
    behind = [max(seen.nonzero().flatten().tolist(), default=0) for seen in mask[n:, :n]]
    for at, node in enumerate(behind):
        ahead = at - behind.index(node)
        due[at, :n] = mask[node, :n]
        due[at, n + at - ahead : n + at + 1] = True
        wrong = not torch.equal(due[at], mask[n + at])
        if wrong or positions[n + at] != positions[node] + 1 + ahead:
            left[at] = left[at].roll(1)
            state.misread += 1
    return left


def _parents(mask: Tensor, start: int) -> list[int]:
    """Return, for each new row, the index of the last other row that it attends to. -1 means
    none.
    """
    n, width = mask.shape
    first = start + n - width  # the row of column 0
    found = []
    for row, seen in enumerate(mask.tolist(), start=start):
        before = [first + column for column in range(row - first) if seen[column]]
        found.append(before[-1] if before else first - 1)
    return found


TablePair = tuple[Tensor, Tensor]
"""Tables of a target and of its draft."""

PAIR_KINDS = ("peaked", "flat", "near", "equal", "disjoint", "mixed", "tied")
"""Kinds of pairs of tables."""


def random_table(vocab: int, seed: int, scale: float = 1.0) -> Tensor:
    """Return a random table [V, V, V] of float64 logits. A larger `scale` gives peaked rows."""
    generator = torch.Generator().manual_seed(seed)
    return scale * torch.randn(vocab, vocab, vocab, generator=generator, dtype=torch.float64)


def peaked_table(vocab: int, seed: int) -> Tensor:
    """Return a table in which, after every text, one token has a probability over 0.98."""
    table = random_table(vocab, seed)
    return table.scatter_add(-1, table.argmax(-1, keepdim=True), torch.full_like(table, 6.0))


def successor_table(follow: Sequence[int]) -> Tensor:
    """Return a table whose greedy token after token t is `follow[t]`, with a logit gap of 10."""
    vocab = len(follow)
    table = torch.zeros(vocab, vocab, vocab, dtype=torch.float64)
    for last, following in enumerate(follow):
        table[:, last, following] = 10.0
    return table


def make_table_pair(kind: str, vocab: int = 3, seed: int = 21) -> TablePair:
    """Return the tables of a target and a draft of one of `PAIR_KINDS`.

    In "disjoint", the target emits only tokens of the lower half of the vocabulary and the draft
    only those of the upper half, so no draft token can be accepted.
    """
    scale = {"peaked": 4.0, "flat": 0.2}.get(kind, 1.5)
    target, draft = (random_table(vocab, s, scale) for s in (seed, seed + 1))
    if kind == "near":
        draft = target + 0.3 * draft
    if kind == "equal":
        draft = target.clone()
    if kind == "disjoint":
        draft[..., : vocab // 2] = target[..., vocab // 2 :] = -math.inf
    if kind == "mixed":
        draft = mixed_draft(target, seed + 1)
    if kind == "tied":
        first, second = target.topk(2, dim=-1).indices.sort(-1).values.split(1, -1)
        top = target.max(-1, keepdim=True).values
        target = target.scatter(-1, first, top).scatter(-1, second, top)
        draft = target.scatter_add(-1, second, torch.ones_like(top))
    return target, draft


def mixed_draft(target: Tensor, seed: int) -> Tensor:
    """Return a draft table [V, V, V] that equals the target's in three of five rows.

    In one of five rows the two likeliest tokens are exchanged, in another all tokens are shifted.
    """
    generator = torch.Generator().manual_seed(seed)
    how = torch.randint(5, target.shape[:2], generator=generator)[..., None]
    best = target.topk(2, dim=-1)
    exchanged = target.scatter(-1, best.indices, best.values.flip(-1))
    draft = torch.where(how == 3, exchanged, target)
    return torch.where(how == 4, target.roll(1, -1), draft)


def wide_pair(vocab: int, seed: int = 21) -> TablePair:
    """Return two similar tables for a large vocabulary.

    Each row is a window into one vector, so V^3 entries take the memory of 5 V numbers.
    """
    lines = [random_line(5 * vocab, seed + which) for which in range(2)]
    lines[1] = lines[0] + 0.3 * lines[1]
    target, draft = (line.as_strided((vocab,) * 3, (1, 3, 1)) for line in lines)
    return target, draft


def random_line(n: int, seed: int) -> Tensor:
    """Return a vector of n random float64 numbers."""
    generator = torch.Generator().manual_seed(seed)
    return 1.5 * torch.randn(n, generator=generator, dtype=torch.float64)


UNCERTAIN_TOKENS = 3
"""Number of possible target tokens at the uncertain position of a deep pair."""


def deep_pair(vocab: int, level: int, seed: int = 21) -> TablePair:
    """Return two tables that give one token probability 1, except after the token `level`.

    That token is the next higher id. After the token `level`, the draft may emit any token, and the
    target one of three. After a prompt that ends with 0, the first draft tokens are always
    accepted. So only one draft level is random, even with a large vocabulary.
    """
    last = torch.arange(vocab)
    sure = torch.full((vocab, vocab), -math.inf, dtype=torch.float64)
    sure[last, (last + 1) % vocab] = 0.0
    target, draft = sure.clone(), sure.clone()
    logits = random_line(vocab, seed)
    ranks = [1, vocab // 3, vocab - 3]  # ranks of the target's tokens in the draft's distribution
    tokens = logits.argsort(descending=True)[ranks]
    target[level] = -math.inf
    target[level, tokens] = random_line(UNCERTAIN_TOKENS, seed + 1) / 3
    draft[level] = logits
    shape = (vocab,) * 3
    return target.expand(shape), draft.expand(shape)


@lru_cache(maxsize=4)
def make_exit_table(table: Tensor, share: float = 1.0) -> Tensor:
    """Return a table for the output of a first layer: the table with noise.

    A table whose rows share memory is returned unchanged.

    Args:
        share: standard deviation of the noise, relative to that of the table.
    """
    if table.untyped_storage().nbytes() < table.nbytes:
        return table
    finite = table[table.isfinite()]
    noise = random_table(table.shape[-1], 7, share * float(finite.std()))
    return table + noise


def fix_token(tables: TablePair, prompt: Sequence[int], token: int) -> TablePair:
    """Return the pair with a target that is certain of the token after `prompt`.

    This leaves fewer outcomes to enumerate.
    """
    target = tables[0].clone()
    before, last = prompt[-2:]
    target[before, last] = -math.inf
    target[before, last, token] = 0.0
    return target, tables[1]


def find_wrong_rows(
    state: Any,
    text: Sequence[int],
    first: int = 0,
    *,
    longer: bool = False,
    layers: Sequence[int] | None = None,
    behind: bool = False,
) -> str | None:
    """Return a description of a wrong row in a state, or None if the state is a prefix of the text.

    Args:
        state: a `TableState`.
        text: committed ids.
        first: index of the token of row 0.
        longer: allow rows after the end of the text.
        layers: layers that should have rows; default: all.
        behind: allow fewer rows in later layers, as in a draft model with early exits.
    """
    due = text[first:]
    lengths = state.lengths if layers is None else [state.lengths[layer] for layer in layers]
    if len(set(lengths)) > 1 and not (behind and lengths == sorted(lengths, reverse=True)):
        return f"layers of {state.lengths} rows"
    if state.left_out:
        return _find_wrong_selected_rows(state, due)
    if lengths and lengths[0] > len(due) and not longer:
        return f"{lengths[0]} rows for {len(due)} committed tokens"
    for row, (token, truth) in enumerate(zip(state.ids, due, strict=False)):
        if token != truth:
            return f"row {row} has token {token} where the text has {truth}"
    for row, position in enumerate(state.positions[: len(due)]):
        if position != row:
            return f"row {row} was computed at position {position}"
    return None


def _find_wrong_selected_rows(state: TableState, due: Sequence[int]) -> str | None:
    """Return a description of wrong rows in a state of which only some rows were kept, or None."""
    for at, row in enumerate(state.rows):
        if row.position >= len(due):
            return f"row {at} is at position {row.position} of {len(due)} committed tokens"
        if row.id != due[row.position]:
            return f"row {at} has token {row.id} where the text has {due[row.position]}"
    return None

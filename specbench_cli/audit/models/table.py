"""Models that are tables: small enough for every outcome of a decoding to be walked.

The logits of a row are an entry of a table: by the token before it and by its own. A vocabulary of
3 to 5 tokens makes the distribution of a few tokens a list of a few hundred numbers.
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


class Row(NamedTuple):
    """What is remembered of a row that was fed.

    follows: the row of the state that it comes after, -1 for none; features: what a head read
    beside its id; before: the id that a head took for that of the token before it.
    """

    id: int
    position: int
    follows: int
    features: Tensor | None = None
    before: int = 0


LEFT_OUT = -2
"""What a row follows whose neighbour was left out of a state."""


class TableState:
    """Record of the rows that were fed, and of how many of them each layer processed.

    Attributes:
        misread: number of rows that were read at a wrong position or with wrong features.
    """

    by_row = True

    def __init__(self, capacity: int, n_layers: int = 1) -> None:
        self.capacity = capacity
        self.rows: list[Row] = []
        self.lengths = [0] * n_layers
        self.kept = self.left_out = 0
        self.misread = 0

    @property
    def ids(self) -> list[int]:
        """The id of each row."""
        return [row.id for row in self.rows]

    @property
    def positions(self) -> list[int]:
        """The position that each row was computed at."""
        return [row.position for row in self.rows]

    def length(self, seq: int = 0, layer: int = 0) -> int:
        """See `State`."""
        return self.lengths[layer]

    def position(self, seq: int = 0) -> int:
        """See `State`."""
        return self.lengths[0] + self.left_out

    def select(self, rows: Sequence[int], seq: int = 0) -> None:
        """See `KVState.select`: rows whose neighbour was left out follow nothing that is held."""
        place = {row: at for at, row in enumerate(rows)}
        kept = [self.rows[row] for row in rows]
        self.left_out += len(self.rows) - len(kept)
        self.rows = [row._replace(follows=place.get(row.follows, LEFT_OUT)) for row in kept]
        self.lengths = [len(kept)] * len(self.lengths)
        self.kept = len(kept)

    def append(self, rows: Sequence[Row], layers: Iterable[int] | None = None) -> None:
        """Write rows, at all layers or at some. Raises ValueError where there is no room for
        them."""
        start = len(self.rows)
        if start + len(rows) > self.capacity:
            raise ValueError(f"{len(rows)} rows do not fit behind {start} of {self.capacity}")
        self.rows.extend(rows)
        self.deepen(len(rows), range(len(self.lengths)) if layers is None else layers)

    def deepen(self, n: int, layers: Iterable[int]) -> None:
        """Count n rows more at some layers."""
        for layer in layers:
            self.lengths[layer] += n

    def leave_out(self, seq: int, layers: Iterable[int], n: int) -> None:
        """See `State`: a table says what it does by the tokens alone, whatever layers held them."""
        self.deepen(n, layers)

    def commit(self, seq: int, path: Sequence[int], loose: int = 0) -> None:
        """See `State`."""
        written, base = self.rows[self.kept :], self.kept
        for at, row in enumerate(path, base):
            kept = written[row]
            self.rows[at] = kept if kept.follows == at - 1 else kept._replace(follows=at - 1)
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
    """Logits are an entry of `table` [V, V, V]: by the token before the last, then by the last.

    What it reads is what its state holds, so a stale or missing row changes the logits, as does a
    row at a wrong position: it reads as another token. The first row of a sequence has no token
    before it and takes id 0 in its place; a tree's row follows the last row that its mask shows.

    Args:
        exits: another such table, which says what leaves a first layer; default: there is one layer
            only. In the second, a row that comes beside another row of it reads as another token,
            as does every row that has passed over some before it.
        inner: further layers between the two, which leave what the first does: a set of sublayers
            to pass over may be any of theirs.

    Rows that enter a later layer beyond those that came through the one before are another's, who
    looks ahead (`LookAhead`): they leave as they came, and shifted if they stand elsewhere or see
    something else than they should; a row of its own that sees one of them reads as another token.

    A layer whose attention is passed over sees no token before, one whose MLP is not its own.

    Attributes:
        foresees: the table by which such rows speak where they enter the first layer.
    """

    reads: type[Tokens | Features] = Tokens
    module: LearntTable
    foresees: Tensor

    def __init__(
        self, name: str, table: Tensor, exits: Tensor | None = None, inner: int = 0
    ) -> None:
        self.name = name
        self.table = table
        self.layers = (table,) if exits is None else (*(exits,) * (1 + inner), table)
        self.vocab_size = table.shape[-1]
        self.n_layers = len(self.layers)
        self.hidden_size = self.vocab_size  # its rows are its logits
        self.max_positions = 1 << 20
        self.device = table.device
        self.dtype = table.dtype
        self.weight_bytes = table.nbytes

    def new_state(self, capacity: int, n_seqs: int = 1) -> State:
        """See `Decoder`."""
        return TableState(capacity, self.n_layers)

    def execute(self, model_input: ModelInput) -> ModelOutput:
        """See `Decoder`; one sequence of ids at a time."""
        x, state, logits_at = model_input.x, model_input.state, model_input.logits_at
        positions, mask, layers = model_input.positions, model_input.mask, model_input.layers
        skip, taps = model_input.skip, model_input.taps
        low, high = layers or (0, self.n_layers)
        if isinstance(x, Hidden) and not low and high == self.n_layers and positions is not None:
            return self._embedded(x.rows[0], state, positions[0], mask, taps)
        self.ran += 1
        reads = Hidden if low else self.reads
        if not isinstance(x, reads) or not isinstance(state, TableState):
            raise ValueError(f"a {self.name} table reads {reads.__name__}, on its own states")
        over = expand_skip(skip) if skip else frozenset()
        every = range(low, high)
        run = [at for at in every if (at, "attention") not in over] if over else every
        start = state.length(0, run[0] if run else low)
        n = self._append(model_input, state, start, low, run)
        beyond = None
        if isinstance(x, Hidden) and x.rows.shape[1] > n:
            assert positions is not None
            beyond = _beyond(x.rows[0, n:], mask, positions[0], state)
            if mask is not None:
                ahead = mask[:n, n:].any(-1)  # rows of the text that attend to rows that look ahead
                state.misread += int(ahead.sum())
                x = Hidden(x.rows[:, :n] + ahead[None, :, None])
            else:
                x = Hidden(x.rows[:, :n])
        rows = range(start, start + n)
        before = [self.before(state, row) for row in rows]
        last = [self.read(state, row) for row in rows]
        if isinstance(x, Hidden):
            due = _rows(self.layers[low - 1], before, last)
            wrong = (x.rows[0] != due).any(-1).tolist()
            last = [(token + off) % self.vocab_size for token, off in zip(last, wrong, strict=True)]
        if not run and not isinstance(x, Hidden):
            del state.rows[-n:]  # no layer holds them
        spoken = [at for at in every if at in run or (at, "mlp") not in over] if over else every
        if not spoken:
            hidden = x.rows if isinstance(x, Hidden) else self.embed(cast(Tokens, x).ids)
        else:
            before, last = self._changed(before, last, over, run, low, spoken[-1])
            hidden = _rows(self.layers[spoken[-1]], before, last)[None]
        tapped = {
            at: hidden if at == high - 1 else _rows(self.layers[at], before, last)[None]
            for at in taps
        }
        if beyond is not None:
            hidden = torch.cat((hidden, beyond[None]), 1)
        if logits_at is None or high < self.n_layers:
            return ModelOutput(None, hidden, tapped)
        if isinstance(logits_at, Tensor):
            return ModelOutput(hidden[:, logits_at], hidden, tapped)
        return ModelOutput(hidden[:, -1:] if logits_at == "last" else hidden, hidden, tapped)

    def _append(
        self, model_input: ModelInput, state: TableState, start: int, low: int, run: Sequence[int]
    ) -> int:
        """Append the input's rows to the state and return their number."""
        x, positions, mask = model_input.x, model_input.positions, model_input.mask
        if not isinstance(x, Tokens | Features):
            n = x.rows.shape[1] if not low else min(x.rows.shape[1], len(state.rows) - start)
            state.deepen(n, run)
            return n
        n = x.ids.shape[1]
        first = start + state.left_out
        at = range(first, first + n) if positions is None else positions[0].tolist()
        follows = range(start - 1, start + n - 1) if mask is None else _parents(mask, start)
        features = x.rows[0] if isinstance(x, Features) else [None] * n
        fed = zip(x.ids[0].tolist(), at, follows, features, strict=True)
        state.append([Row(*row) for row in fed], run)
        return n

    def _changed(
        self,
        before: list[int],
        last: list[int],
        over: frozenset[tuple[int, str]],
        run: Sequence[int],
        low: int,
        layer: int,
    ) -> tuple[list[int], list[int]]:
        """Return the tokens that a layer reads, changed by the sublayers that were skipped."""
        if not low and any(at < layer for at, _ in over):
            last = [(token + 1) % self.vocab_size for token in last]
        if layer not in run:
            before = [0] * len(before)
        if (layer, "mlp") in over:
            last = [0] * len(last)
        return before, last

    def _embedded(
        self,
        rows: Tensor,
        state: State,
        positions: Tensor,
        mask: Tensor | None,
        taps: Sequence[int],
    ) -> ModelOutput:
        """A whole forward over embeddings [n, V], and behind them rows that look ahead."""
        assert isinstance(state, TableState)
        n = int((rows >= 0).all(-1).sum())
        hidden, tapped = rows[:0], dict[int, Tensor]()
        self.ran += not n
        if n:
            assert mask is not None
            ahead = mask[:n, n:].any(-1)  # rows of the text that attend to rows that look ahead
            state.misread += int(ahead.sum())
            ids = (rows[:n].argmax(-1) + ahead) % self.vocab_size
            out = self.forward(
                Tokens(ids[None]),
                state,
                positions=positions[None, :n],
                mask=mask[:n, :n],
                taps=taps,
            )
            hidden, tapped = out.hidden[0], dict(out.aux_hidden_states)
        nodes = range(len(state.rows) - max(1, n), len(state.rows))
        each = (len(rows) - n) // len(nodes)
        ways = [
            way_of(self.foresees, self.table, (self.before(state, at), self.read(state, at)), each)
            for at in nodes
        ]
        whole = torch.cat((hidden, _beyond(torch.cat(ways), mask, positions, state)))[None]
        return ModelOutput(whole, whole, tapped)

    def embed(self, ids: Tensor) -> Tensor:
        """See `Decoder`."""
        return torch.nn.functional.one_hot(ids, self.vocab_size).to(self.dtype)

    def norm(self, rows: Tensor) -> Tensor:
        """See `Decoder`: nothing."""
        return rows

    def unembed(self, rows: Tensor) -> Tensor:
        """See `Decoder`: nothing."""
        return rows

    def unembed_ids(self, rows: Tensor, ids: Tensor) -> Tensor:
        """See `Decoder`: some of its logits."""
        return rows[..., ids]

    def trainable(self) -> TableDecoder:
        """A copy that has its entries from a `module`."""
        made = copy.copy(self)
        made.module = LearntTable(self.table)
        made.publish()
        return made

    def publish(self) -> None:
        """Say what the module now says."""
        self.table = self.module.table.detach().clone()
        self.layers = (*self.layers[:-1], self.table)

    def before(self, state: TableState, row: int) -> int:
        """The token before that of a row."""
        return self.read(state, state.rows[row].follows)

    def read(self, state: TableState, row: int) -> int:
        """The token of a row, shifted by how far its position is off."""
        if row < 0:
            return 0
        held = state.rows[row]
        follows = held.follows
        if follows == LEFT_OUT:
            return held.id
        due = 0 if follows < 0 else state.rows[follows].position + 1
        state.misread += held.position != due
        return (held.id + held.position - due) % self.vocab_size


class RecurrentTableState(RecurrentState):
    """What a recurrent table remembers: the rows that it read, whole."""

    left_out = 0

    @property
    def rows(self) -> Sequence[Row]:
        """The rows read."""
        return self.held(0) or ()

    @property
    def ids(self) -> list[int]:
        """The id of each row."""
        return [row.id for row in self.rows]

    @property
    def positions(self) -> list[int]:
        """The position that each row was computed at."""
        return [row.position for row in self.rows]

    @property
    def lengths(self) -> list[int]:
        """Rows, as `TableState` has them by layer."""
        return [self.length()]


class RecurrentTable(TableDecoder):
    """The same logits from a state that only knows the ends of forwards."""

    trees = False

    def new_state(self, capacity: int, n_seqs: int = 1) -> RecurrentState:
        """See `Decoder`."""
        return RecurrentTableState(n_seqs, capacity)

    def execute(self, model_input: ModelInput) -> ModelOutput:
        """See `Decoder`; whole forwards over chains."""
        state, layers = model_input.state, model_input.layers
        if model_input.mask is not None or layers not in (None, (0, self.n_layers)):
            raise trees_fault(self)
        assert isinstance(state, RecurrentTableState)
        read = TableState(state.capacity, self.n_layers)
        read.append(state.rows)
        out = super().execute(model_input._replace(state=read))
        state.write(0, len(read.rows) - len(state.rows), tuple(read.rows))
        return out


class LearntTable(nn.Module):
    """A table as a torch module, called as transformers' are."""

    def __init__(self, table: Tensor) -> None:
        super().__init__()
        self.table = nn.Parameter(table.clone())

    def forward(self, input_ids: Tensor) -> ModelOutput:
        """Logits [b, n, V] after each of the ids [b, n]."""
        before = nn.functional.pad(input_ids[:, :-1], (1, 0))
        rows = self.table[before, input_ids]
        return ModelOutput(rows, rows)


def _rows(table: Tensor, before: Sequence[int], last: Sequence[int]) -> Tensor:
    """Entries [n, V] of a table; an array finds them in half the time."""
    return torch.from_numpy(table.numpy()[before, last])


def way_of(draft: Tensor, target: Tensor, tokens: tuple[int, int], levels: int) -> Tensor:
    """Logits [levels, V] of the tokens behind the one that a greedy target says after two tokens,
    where a draft's table goes its own greedy way."""
    last, token = tokens[1], int(target[tokens].argmax())
    way: list[Tensor] = []
    for _ in range(levels):
        way.append(draft[last, token])
        last, token = token, int(way[-1].argmax())
    return torch.stack(way)


def _beyond(rows: Tensor, mask: Tensor | None, positions: Tensor, state: TableState) -> Tensor:
    """What leaves of rows [e, V] that look ahead, the last ones under a mask and at positions:
    chains of one length, each behind a row of the text; without a mask one, behind the last row
    that there is."""
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
    """The last row of the state that each new row sees, itself left out; -1 for none."""
    n, width = mask.shape
    first = start + n - width  # the row that column 0 stands for
    found = []
    for row, seen in enumerate(mask.tolist(), start=start):
        before = [first + column for column in range(row - first) if seen[column]]
        found.append(before[-1] if before else first - 1)
    return found


Pair = tuple[Tensor, Tensor]
"""The tables of a target and of its draft."""

KINDS = ("peaked", "flat", "near", "equal", "disjoint", "mixed", "tied")
"""How a pair's distributions lie to each other."""


def random_table(vocab: int, seed: int, scale: float = 1.0) -> Tensor:
    """A table [V, V, V] of float64 logits; the larger `scale`, the more peaked the
    distributions."""
    generator = torch.Generator().manual_seed(seed)
    return scale * torch.randn(vocab, vocab, vocab, generator=generator, dtype=torch.float64)


def sure_table(vocab: int, seed: int) -> Tensor:
    """A table whose likeliest token has a probability of more than 0.98 in every row."""
    table = random_table(vocab, seed)
    return table.scatter_add(-1, table.argmax(-1, keepdim=True), torch.full_like(table, 6.0))


def successor_table(follow: Sequence[int]) -> Tensor:
    """A table whose greedy choice after any token t is `follow[t]`, by a gap of 10."""
    vocab = len(follow)
    table = torch.zeros(vocab, vocab, vocab, dtype=torch.float64)
    for last, following in enumerate(follow):
        table[:, last, following] = 10.0
    return table


def pair(kind: str, vocab: int = 3, seed: int = 21) -> Pair:
    """Two tables by how they lie to each other, one of `KINDS`.

    "disjoint": the draft can only say tokens of the vocabulary's upper half, the target only those
    of its lower half, so that no draft token can stand.
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
        draft = mixed(target, seed + 1)
    if kind == "tied":
        first, second = target.topk(2, dim=-1).indices.sort(-1).values.split(1, -1)
        top = target.max(-1, keepdim=True).values
        target = target.scatter(-1, first, top).scatter(-1, second, top)
        draft = target.scatter_add(-1, second, torch.ones_like(top))
    return target, draft


def mixed(target: Tensor, seed: int) -> Tensor:
    """Return a draft table [V, V, V] that equals the target's in three of five rows.

    In one of five rows the two likeliest tokens are exchanged, in another all tokens are shifted.
    """
    generator = torch.Generator().manual_seed(seed)
    how = torch.randint(5, target.shape[:2], generator=generator)[..., None]
    best = target.topk(2, dim=-1)
    exchanged = target.scatter(-1, best.indices, best.values.flip(-1))
    draft = torch.where(how == 3, exchanged, target)
    return torch.where(how == 4, target.roll(1, -1), draft)


def wide_pair(vocab: int, seed: int = 21) -> Pair:
    """Two tables near to each other of a large vocabulary: each row is a window of one line of
    numbers, so that V^3 entries take the memory of 5 V."""
    lines = [random_line(5 * vocab, seed + which) for which in range(2)]
    lines[1] = lines[0] + 0.3 * lines[1]
    target, draft = (line.as_strided((vocab,) * 3, (1, 3, 1)) for line in lines)
    return target, draft


def random_line(n: int, seed: int) -> Tensor:
    """Float64 numbers [n]."""
    generator = torch.Generator().manual_seed(seed)
    return 1.5 * torch.randn(n, generator=generator, dtype=torch.float64)


DOUBTFUL = 3
"""Tokens that the target of a deep pair may say where it is in doubt."""


def deep_pair(vocab: int, level: int, seed: int = 21) -> Pair:
    """Two tables that are sure of each token's successor, the next higher id, and in doubt at one
    place: after the token `level`.

    There the draft may say anything, and the target one of a few tokens, likely ones of the draft's
    and unlikely ones. After a prompt that ends with 0 the first `level` - 1 draft tokens stand for
    certain, so that all chance is in the level after them, however large the vocabulary is.
    """
    last = torch.arange(vocab)
    sure = torch.full((vocab, vocab), -math.inf, dtype=torch.float64)
    sure[last, (last + 1) % vocab] = 0.0
    target, draft = sure.clone(), sure.clone()
    said = random_line(vocab, seed)
    ranks = [1, vocab // 3, vocab - 3]  # of the target's tokens, among the draft's
    tokens = said.argsort(descending=True)[ranks]
    target[level] = -math.inf
    target[level, tokens] = random_line(DOUBTFUL, seed + 1) / 3
    draft[level] = said
    whole = (vocab,) * 3
    return target.expand(whole), draft.expand(whole)


@lru_cache(maxsize=4)
def record_exits(table: Tensor, share: float = 1.0) -> Tensor:
    """What a first layer may say of what a table says: the same, with noise of so large a share of
    its spread; of a table whose rows share memory, the very same."""
    if table.untyped_storage().nbytes() < table.nbytes:
        return table
    finite = table[table.isfinite()]
    noise = random_table(table.shape[-1], 7, share * float(finite.std()))
    return table + noise


def settled(tables: Pair, prompt: Sequence[int], token: int) -> Pair:
    """The pair with a target that is sure of the token after `prompt`: fewer outcomes to walk."""
    target = tables[0].clone()
    before, last = prompt[-2:]
    target[before, last] = -math.inf
    target[before, last, token] = 0.0
    return target, tables[1]


def rows_out_of_place(
    state: Any,
    text: Sequence[int],
    first: int = 0,
    *,
    beyond: bool = False,
    layers: Sequence[int] | None = None,
    behind: bool = False,
) -> str | None:
    """What is wrong with a table's state, which should hold a prefix of the text; None if nothing.

    Args:
        state: a `TableState`.
        text: the committed ids.
        first: the token of the text that row 0 should hold.
        beyond: whether rows may follow that are not of the text.
        layers: those that hold rows; default: all.
        behind: whether later layers may hold fewer rows than earlier ones, as those of a draft
            model may whose first layers speak by themselves.
    """
    due = text[first:]
    lengths = state.lengths if layers is None else [state.lengths[layer] for layer in layers]
    if len(set(lengths)) > 1 and not (behind and lengths == sorted(lengths, reverse=True)):
        return f"layers of {state.lengths} rows"
    if state.left_out:
        return _selection_out_of_place(state, due)
    if lengths and lengths[0] > len(due) and not beyond:
        return f"{lengths[0]} rows for {len(due)} committed tokens"
    for row, (held, truth) in enumerate(zip(state.ids, due, strict=False)):
        if held != truth:
            return f"row {row} holds token {held} where the text has {truth}"
    for row, position in enumerate(state.positions[: len(due)]):
        if position != row:
            return f"row {row} was computed at position {position}"
    return None


def _selection_out_of_place(state: TableState, due: Sequence[int]) -> str | None:
    """The same of a state that holds chosen rows alone: each is of the text at its position."""
    for at, row in enumerate(state.rows):
        if row.position >= len(due):
            return f"row {at} stands at position {row.position} of {len(due)} committed tokens"
        if row.id != due[row.position]:
            return f"row {at} holds token {row.id} where the text has {due[row.position]}"
    return None

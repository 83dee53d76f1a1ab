"""Doubles for the engine's tests: models that are tables, and chance that walks every outcome."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Hashable, Iterator, Mapping, Sequence

import pytest
import torch
from torch import Tensor

from specbench_cli.engine.decoder import Decoder
from specbench_cli.engine.random import Random
from specbench_cli.engine.sampling import Sampling
from specbench_cli.engine.session import Request, Session, Workspace
from specbench_cli.engine.stop import StopRule
from specbench_cli.engine.types import Out, Tokens


class TableState:
    """The ids that were fed, each standing for its cached row."""

    def __init__(self, capacity: int) -> None:
        self.capacity = capacity
        self.clear()

    def length(self, seq: int = 0, layer: int = 0) -> int:
        return len(self.ids)

    def append(self, ids: Sequence[int]) -> None:
        if len(self.ids) + len(ids) > self.capacity:
            raise ValueError(
                f"{len(ids)} rows do not fit behind {len(self.ids)} of {self.capacity}"
            )
        self.ids.extend(ids)

    def commit(self, seq: int, path: Sequence[int]) -> None:
        written = self.ids[self.kept :]
        self.ids[self.kept :] = [written[row] for row in path]
        self.kept = len(self.ids)

    def truncate(self, seq: int, n: int, layers: range | None = None) -> None:
        del self.ids[n:]
        self.kept = min(self.kept, n)

    def snapshot(self) -> object:
        return list(self.ids), self.kept

    def restore(self, handle: object) -> None:
        ids, self.kept = handle
        self.ids = list(ids)

    def clear(self) -> None:
        self.ids: list[int] = []
        self.kept = 0

    @property
    def nbytes(self) -> int:
        return 8 * self.capacity


class TableDecoder(Decoder):
    """Logits are an entry of `table` [V, V, V]: by the token before the last, then by the last.

    What it reads is what its state holds, so a stale or missing row changes the logits. The first
    row of a sequence has no token before it and takes id 0 in its place.
    """

    def __init__(self, name: str, table: Tensor) -> None:
        self.name = name
        self.table = table
        self.vocab_size = table.shape[-1]
        self.n_layers = self.hidden_size = 1
        self.max_positions = 1 << 20
        self.device = table.device
        self.dtype = table.dtype
        self.weight_bytes = table.nbytes

    def new_state(self, capacity: int, n_seqs: int = 1) -> TableState:
        return TableState(capacity)

    def forward(
        self,
        x,
        state,
        *,
        seqs=None,
        positions=None,
        mask=None,
        layers=None,
        skip=frozenset(),
        logits_at="last",
        taps=(),
    ) -> Out:
        assert isinstance(x, Tokens)
        assert x.ids.shape[0] == 1
        new = x.ids[0].tolist()
        state.append(new)
        hidden = self.table.new_zeros(1, len(new), 1)
        if logits_at is None:
            return Out(None, hidden)
        rows = range(len(state.ids) - len(new), len(state.ids))
        at = {"last": rows[-1:], "all": rows}[logits_at]
        last = [state.ids[row] for row in at]
        before = [state.ids[row - 1] if row else 0 for row in at]
        return Out(self.table[before, last][None], hidden)


class ChoiceOracle:
    """Chance that follows a script of choices, and the first possible one where the script ends.

    made: (choice, number of possible ones) of every choice made; weight: their probability.
    """

    def __init__(self, script: Sequence[int]) -> None:
        self.script = script
        self.made: list[tuple[int, int]] = []
        self.weight = 1.0

    def categorical(self, p: Tensor) -> Tensor:
        rows = p.reshape(-1, p.shape[-1]).tolist()
        return torch.tensor([self._choose(row) for row in rows]).reshape(p.shape[:-1])

    def bernoulli(self, a: Tensor) -> Tensor:
        runs, sure = [], 1.0
        for chance in a.tolist():
            runs.append(sure * (1.0 - chance))
            sure *= chance
        successes = self._choose([*runs, sure])
        return torch.arange(len(runs)) < successes

    def _choose(self, weights: Sequence[float]) -> int:
        possible = [i for i, weight in enumerate(weights) if weight > 0.0]
        choice = self.script[len(self.made)] if len(self.made) < len(self.script) else 0
        self.made.append((choice, len(possible)))
        self.weight *= weights[possible[choice]]
        return possible[choice]


Law = Mapping[Hashable, float]


def walk(run: Callable[[Random], Hashable]) -> Law:
    """The exact law of what `run` returns: every outcome of its chance, depth first."""
    law: dict[Hashable, float] = defaultdict(float)
    script: list[int] = []
    while True:
        oracle = ChoiceOracle(script)
        law[run(oracle)] += oracle.weight
        made = oracle.made
        while made and made[-1][0] + 1 == made[-1][1]:
            made.pop()
        if not made:
            return law
        script = [choice for choice, _ in made]
        script[-1] += 1


@pytest.fixture(autouse=True)
def _one_thread() -> Iterator[None]:
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(threads)


@pytest.fixture(scope="session")
def table_decoder() -> type[TableDecoder]:
    return TableDecoder


@pytest.fixture(scope="session")
def exact_law() -> Callable[[Callable[[Random], Hashable]], Law]:
    return walk


@pytest.fixture(scope="session")
def open_session() -> Callable[..., Session]:
    """A session on table models: target's table, draft's table, and what a request is made of."""

    def make(
        target: Tensor,
        draft: Tensor | None = None,
        *,
        prompt: Sequence[int] = (0,),
        eos: Sequence[int] = (),
        budget: int = 8,
        sampling: Sampling | None = None,
        **rest: object,
    ) -> Session:
        stop = {key: rest.pop(key) for key in ("strings", "decode") if key in rest}
        decoders = {"target": TableDecoder("target", target)}
        if draft is not None:
            decoders["draft"] = TableDecoder("draft", draft)
        return Session(
            Workspace(decoders, capacity=len(prompt) + budget),
            Request("table/0", 0, tuple(prompt), StopRule(frozenset(eos), budget, **stop)),
            sampling or Sampling(),
            **rest,
        )

    return make


@pytest.fixture(scope="session")
def random_table() -> Callable[..., Tensor]:
    """A table [V, V, V] of float64 logits; the larger `scale`, the more peaked the laws."""

    def make(vocab: int, seed: int, scale: float = 1.0) -> Tensor:
        generator = torch.Generator().manual_seed(seed)
        return scale * torch.randn(vocab, vocab, vocab, generator=generator, dtype=torch.float64)

    return make


@pytest.fixture(scope="session")
def successor_table() -> Callable[..., Tensor]:
    """A table whose greedy choice after any token t is `follow[t]`, by a gap of 10."""

    def make(follow: Sequence[int]) -> Tensor:
        vocab = len(follow)
        table = torch.zeros(vocab, vocab, vocab, dtype=torch.float64)
        for last, following in enumerate(follow):
            table[:, last, following] = 10.0
        return table

    return make

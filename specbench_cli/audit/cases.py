"""Audit cases: requests to pairs of table models, with decoding rules, EOS tokens and budgets.

A table model's logits are entries of a table [V, V, V], indexed by the last two tokens
(`audit.models.table`). The audit decodes such requests with a method and checks the results.
"""

from __future__ import annotations

import random
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

from specbench_cli.audit.models.head import (
    make_table_artifact,
)
from specbench_cli.audit.models.observed_session import ObservedSession, nominal_cost
from specbench_cli.audit.models.table import (
    RecurrentTable,
    TableDecoder,
    TablePair,
    deep_pair,
    fix_token,
    make_exit_table,
    make_table_pair,
    random_table,
    wide_pair,
)
from specbench_cli.audit.models.track import TrackPlace, track_pair
from specbench_cli.audit.reference import Reference
from specbench_cli.engine.learning import Memory, learn
from specbench_cli.engine.method import Method
from specbench_cli.engine.request import Request
from specbench_cli.engine.sequence import StopRule
from specbench_cli.engine.session import Session
from specbench_cli.engine.types import Rule
from specbench_cli.engine.verify.sampling import Sampling
from specbench_cli.engine.workspace import Workspace

RULES: tuple[Rule, ...] = ("greedy", "coupled", "rejection")
EXACT_RULES: tuple[Rule, ...] = RULES[:2]
"""Decoding rules under which a lossless method emits exactly the target's tokens.

"coupled" adds Gumbel noise, keyed by seed and position, so that every method draws the same tokens.
"""

PROMPT = (1, 0, 2, 1, 0)
"""Prompt whose suffix (1, 0) occurs twice, so that lookup methods find a draft."""

LONG_PROMPT, LONG_OUTPUT = 300, 80
"""Minimum numbers of prompt tokens and output tokens of a long case."""

LONG_VOCAB, LONG_SEED = 9, 72
"""Vocabulary size and seed of a long case. With this seed the text enters no short cycle."""

PARTLY_EQUAL = "partly equal"
"""Name of a pair whose draft (and its first layer) equals the target in some rows only."""

REQUESTS = 4
"""Number of requests that warm up a method which keeps state between requests."""

SPARE_ROWS = 64
"""Spare rows of the state, for the nodes of a tree."""


@dataclass(frozen=True)
class Case:
    """A request to a pair of tables.

    Attributes:
        name: name of the pair of tables, such as "near".
        tables: tables of the target and of the draft.
        length: number of output tokens that are checked when all outcomes are enumerated.
        recurrent: models ("target", "draft") with a recurrent state instead of rows.
    """

    name: str
    tables: TablePair
    sampling: Sampling
    prompt: tuple[int, ...] = PROMPT
    eos: tuple[int, ...] = ()
    budget: int = 6
    length: int = 3
    prompt_id: str = "table/0"
    recurrent: frozenset[str] = frozenset()

    def create_workspace(self) -> Workspace:
        """Return a workspace with the tables as decoders, and the heads that methods need."""
        target, draft = self.tables
        kinds = dict.fromkeys(self.recurrent, RecurrentTable)
        twin = draft is target or self.name in ("equal", PARTLY_EQUAL)
        strange = 0.0 if twin else 1.0  # an equal draft also has the target's first layer
        decoders = {
            "target": kinds.get("target", TableDecoder)("target", target, make_exit_table(target)),
            "draft": kinds.get("draft", TableDecoder)(
                "draft", draft, make_exit_table(draft, strange)
            ),
        }
        capacity = len(self.prompt) + self.budget + SPARE_ROWS
        make = partial(make_table_artifact, decoders)
        return Workspace(decoders, capacity, load_artifact=make, costs=nominal_cost)

    def open(self, workspace: Workspace | None = None, **rest: Any) -> ObservedSession:
        """Return a session on the request. `rest` are arguments of `Session`."""
        return ObservedSession(
            workspace or self.create_workspace(), self.request, self.sampling, **rest
        )

    @property
    def request(self) -> Request:
        """The request to decode."""
        stop = StopRule(frozenset(self.eos), self.budget)
        return Request(self.prompt_id, 0, self.prompt, stop)

    @property
    def is_narrow(self) -> bool:
        """True if at most two tokens are possible after every text. Then top-k 2 removes no
        token.
        """
        return all(int(table.isfinite().sum(-1).max()) <= 2 for table in self.tables)

    def warm_up(self, method: Method) -> dict[str, Any]:
        """Decode this request to warm up a method that keeps state between requests.

        Returns:
            Arguments of `open` with the state after the warm-up. Empty for other methods.
        """
        if method.state_scope == "prompt":
            return {}
        kept: dict[str, Any] = {"workspace": self.create_workspace(), "memory": Memory()}
        for pass_ in range(1, 2 if method.learns else 1 + REQUESTS):
            decode_and_learn(method, self.open(pass_=pass_, **kept))
        return kept

    def __str__(self) -> str:
        s = self.sampling
        cuts = f" top-k {s.top_k}" * bool(s.top_k) + f" top-p {s.top_p}" * (s.top_p < 1)
        rule = s.rule if s.rule == "greedy" else f"{s.rule} T={s.temperature:g}{cuts}"
        eos = f", EOS {' '.join(map(str, self.eos))}" if self.eos else ""
        vocab = self.tables[0].shape[-1]
        prompt = " ".join(map(str, self.prompt))
        keeps = f", {' and '.join(sorted(self.recurrent))} recurrent" if self.recurrent else ""
        tables = f"{self.name} tables of {vocab} tokens{keeps}"
        return f"{tables}, {rule}{eos}, budget {self.budget}, after {prompt}"


def decode_and_learn(method: Method, session: Session) -> None:
    """Decode a request, and let a learning method learn from it."""
    for _ in method.generate(session):
        pass
    if method.learns:
        learn(method, session)


def enumerated_cases(rule: Rule, *, include_costly: bool) -> Iterator[Case]:
    """Yield cases whose outcomes are all enumerated, under a rule that samples.

    Args:
        include_costly: also yield cases with many outcomes. For methods with few outcomes per step.
    """

    def warp(temperature: float = 1.0, top_k: int = 0, top_p: float = 1.0) -> Sampling:
        return Sampling(rule, temperature, top_k, top_p)

    near, plain = fix_token(make_table_pair("near"), PROMPT, 2), warp()
    yield Case("near", make_table_pair("near"), warp(2.0, top_k=2))
    yield Case("peaked", fix_token(make_table_pair("peaked"), PROMPT, 1), warp(0.5))
    yield Case("flat", fix_token(make_table_pair("flat"), PROMPT, 2), warp(0.5))
    yield Case("near", near, warp(0.8, top_p=0.7))
    yield Case("tied", fix_token(make_table_pair("tied"), PROMPT, 1), warp(1.0, top_k=1))
    yield Case("disjoint", make_table_pair("disjoint", 4), plain)
    yield Case("equal", fix_token(make_table_pair("equal"), PROMPT, 0), warp(0.5))
    yield Case(
        "peaked", fix_token(make_table_pair("near"), PROMPT, 1), warp(0.5, top_k=2), length=4
    )
    # In outputs of four tokens, the EOS token can be inside a draft of two tokens, at the draft's
    # end, or be the bonus token.
    for eos in ((0,), (1,), (0, 2)):
        yield Case("near", near, plain, eos=eos, length=4)
    for budget in (1, 2, 3, 4):
        yield Case("near", near, plain, eos=(2,), budget=budget, length=min(3, budget))
    if include_costly:
        yield wide_case(rule, 64)
        yield Case("near", make_table_pair("near"), plain)
        yield Case("peaked", make_table_pair("peaked"), plain)
        yield Case("near", make_table_pair("near", 4), warp(1.5, top_k=3, top_p=0.9))
        yield Case("near", make_table_pair("near", 5), warp(0.7, top_k=2), eos=(4,))
        yield Case("flat", make_table_pair("flat"), warp(2.0))


WIDE_WARP = (0.7, 4, 0.7)
"""Temperature, top-k and top-p of a wide case. Applying top-p first would keep other tokens."""


def wide_case(rule: Rule, vocab: int = 4096) -> Case:
    """Return a case with a vocabulary of realistic size, under top-k and top-p."""
    sampling = Sampling() if rule == "greedy" else Sampling(rule, *WIDE_WARP)
    return Case("wide", wide_pair(vocab), sampling, length=2)


def deep_cases(rule: Rule, levels: int) -> Sequence[Case]:
    """Return cases in which only the last level of a draft is uncertain.

    The first case has a large vocabulary, the second a small one with fewer outcomes.

    Args:
        levels: number of levels of the draft.
    """
    doubt = Sampling(rule, 1.0)
    return [
        Case("deep", deep_pair(vocab, levels), doubt, budget=levels + 3, length=levels + 1)
        for vocab in (64, 13)
    ]


def late_level_cases(rule: Rule, levels: int) -> Iterator[tuple[str, Case]]:
    """Yield a name and a case for each late level of a draft, from the third level on.

    In each case, both models are uncertain at the first level, at the late level and at the level
    before the late one. So the audit finds a late test that wrongly depends on an earlier test.

    Args:
        levels: Number of levels of the draft, at least 3.
    """
    for late in range(3, levels + 2):
        places: list[TrackPlace] = ["sure"] * (levels + 2)
        for at in (1, late - 1, late):
            places[at] = "doubt"
        name = f"level {late} of a draft" if late <= levels else "the bonus token"
        yield name, _track_case(rule, places, late + 1)


HISTORIES = 6
"""Number of `history_cases`: texts with different sequences of accepted and rejected drafts."""


def history_cases(rule: Rule) -> Iterator[Case]:
    """Yield cases with uncertain tokens after steps that accepted all, some or no draft tokens."""
    for turn in range(HISTORIES):
        yield _track_case(rule, _history_places(turn, 6 + turn), 9 + turn)


def late_token_case(rule: Rule, output: int = LONG_OUTPUT) -> Case:
    """Return a case with uncertain tokens after a long output of accepted and rejected tokens."""
    return _track_case(rule, _history_places(0, output), output + 3)


def forked_case(rule: Rule) -> Case:
    """Return a case with two possible first tokens, after which the distributions differ."""
    tables = track_pair(("sure", "fork", "doubt", "sure"), choices=3)
    return Case("forked", tables, Sampling(rule, 1.0), budget=4, length=3)


def _history_places(seed: int, n: int) -> list[TrackPlace]:
    """Return n places, some with a wrong draft, then two places with uncertain tokens."""
    chance = random.Random(seed)
    places: list[TrackPlace] = ["sure", *chance.choices(("sure", "wrong"), (3, 2), k=n - 1)]
    return [*places, "doubt", "sure", "doubt"]


def _track_case(rule: Rule, places: Sequence[TrackPlace], length: int) -> Case:
    tables = track_pair(tuple(places))
    return Case("track", tables, Sampling(rule, 1.0), budget=len(places), length=length)


WARPS = ((1.0, 0, 1.0), (0.6, 3, 1.0), (1.4, 0, 0.8), (0.9, 3, 0.6))


def make_sampling(rule: Rule, turn: int) -> Sampling:
    """Return a sampling configuration with this rule.

    Args:
        turn: index that selects temperature, top-k, top-p and seed.
    """
    if rule == "greedy":
        return Sampling(seed=turn)
    temperature, top_k, top_p = WARPS[(turn + turn // len(WARPS)) % len(WARPS)]
    return Sampling(rule, temperature, top_k, top_p, seed=turn)


def random_cases(rule: Rule, n: int, levels: int) -> Iterator[Case]:
    """Yield n requests to random tables. The kind of draft changes from request to request.

    The draft is near the target, unrelated ("flat"), equal, or never right ("disjoint").

    Args:
        levels: maximum draft levels of the method. Some budgets are close to it.
    """
    rng, levels = random.Random(5), max(1, levels)  # a budget must be at least 1
    for turn in range(n):
        vocab, kind = 3 + turn % 3, ("near", "flat", "equal", "disjoint")[turn % 4]
        tables = make_table_pair(
            kind, max(4, vocab) if kind == "disjoint" else vocab, seed=100 + 2 * turn
        )
        if kind == "flat":
            tables = random_table(vocab, 100 + 2 * turn, 1.5), tables[1]
        allowed = range(tables[0].shape[-1] // 2 if kind == "disjoint" else vocab)
        ids = [rng.choice(allowed) for _ in range(2 + turn % 6)]
        budget = (24, 1, 2, levels, levels + 1, levels + 2)[turn % 6]
        yield Case(
            kind,
            tables,
            make_sampling(rule, turn),
            prompt=(*ids, *ids[: 2 + turn % 3]),
            budget=budget,
            prompt_id=f"table/{turn}",
        )


def long_case(rule: Rule, prompt: int = LONG_PROMPT, output: int = LONG_OUTPUT) -> Case:
    """Return a case with a long prompt and a long output, with rejected drafts throughout."""
    chance = random.Random(7)
    ids = tuple(chance.choice(range(LONG_VOCAB)) for _ in range(prompt))
    tables = make_table_pair("mixed", LONG_VOCAB, seed=LONG_SEED)
    return Case("mixed", tables, make_sampling(rule, 0), ids, budget=output, prompt_id="long/0")


def tied_logits_case(rule: Rule) -> Case:
    """Return a request whose two likeliest tokens are equally likely at every position."""
    return Case(
        "tied", make_table_pair("tied", 5), make_sampling(rule, 0), budget=20, prompt_id="tied/0"
    )


def add_eos(case: Case, ids: Sequence[int], turn: int) -> Case:
    """Return the case with zero, one or two EOS ids.

    Args:
        ids: tokens of an output that was decoded without EOS. The EOS ids are taken from these.
        turn: number that selects how many EOS ids there are, and at which positions.
    """
    places = ((), (turn % 7,), (turn % 11, turn % 5))[turn % 3]
    return replace(case, eos=tuple({ids[place % len(ids)] for place in places}))


def reference_tokens(case: Case, n: int) -> list[int]:
    """Return the first n tokens that the target emits, ignoring EOS."""
    return Reference(case.tables[0], case.sampling).decode(case.prompt_id, case.prompt, n)

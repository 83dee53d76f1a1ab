"""One record: what is kept of one output of one method (a prompt's turn, in one pass).

Null rules. Peers leave null what they cannot see, never `ns.total`, `n_tokens` or `output_ids`. A
failed cell has `error`, finish "error", and nulls. A void cell may have lost its times; it keeps
ids, counters and verdict. What a machine cannot measure (`peak_bytes`, `other_cpu`) and what a task
does not have (`score`) may be null anywhere.

The types here are what reading a line checks, ranges included; `invariants` checks what fields say
of each other.
"""

from __future__ import annotations

import json
from collections.abc import Iterable
from dataclasses import dataclass, field
from functools import cache
from typing import Annotated, Literal, Protocol, get_args

from pydantic import AfterValidator, ConfigDict, Field, TypeAdapter, ValidationError
from typing_extensions import TypeAliasType

from specbench_cli.config.problems import first_problem
from specbench_cli.errors import LONGEST_TEXT, PromptError, UsageError, on_one_line
from specbench_cli.former_names import current_params

SCHEMA = 9
"""Version of the record written now; every older one stays readable.

2 added `log_likelihood` and `verdict.rounding`, 3 `params.source`, 4 `forwards.messages`,
`log_probs`, `drafts` and `extra`, 5 `steps.relaxed`, `forwards.kinds.share`, `ns.learn`, `batch`,
`target_equivalents` and `version`, 6 `likelihood`, 7 `worker`, 8 `valid`, 9 `synthetic` and
`energy_j`; an older record lacks them, which reads as null (no messages, whole forwards).
"""

BASELINE = "vanilla"
"""The label of the method that all others are compared with."""

Count = Annotated[int, Field(ge=0, lt=2**63)]
"""Of what is counted, an id, or a time in ns."""
Whole = Annotated[int, Field(ge=-(2**63), lt=2**63)]
Finite = Annotated[float, Field(allow_inf_nan=False)]
LogChance = Annotated[float, Field(le=0, allow_inf_nan=False)]
Share = Annotated[float, Field(ge=0, le=1)]
PASSES_APART = 1000
"""A pass's number: its process's, from 1, and this for each pass that the process made before it;
it makes several under several loads."""

Name = Annotated[str, Field(pattern=r"^[^\p{Cc}\p{Zl}\p{Zp}]+$", max_length=2 * LONGEST_TEXT)]
"""Name that tables show: not empty, of limited length, without control characters and line breaks.
The limit is twice that of a text, since an id combines a task name and a text of its file."""
Reason = Annotated[str, AfterValidator(on_one_line)]
"""Untrusted text. Runs of older versions may contain longer texts, which are truncated."""
Json = TypeAliasType("Json", "bool | int | Finite | str | list[Json] | dict[str, Json] | None")
"""Whatever JSON can say: no nan, no infinity."""

STRICT = ConfigDict(strict=True, extra="forbid", allow_inf_nan=False)
"""No text for a number, no field that nobody knows, no nan."""

Family = Literal[
    "multi_turn", "translation", "summarization", "qa", "math_reasoning", "rag", "code", "other"
]
"""What a question asks for: the strata of every statistic."""
FAMILIES: tuple[Family, ...] = get_args(Family)
FINISHES = ("eos", "length", "stop", "error")
VERDICTS = ("reference", "identical", "near-tie", "mismatch", "unchecked")
LOSSLESS = ("exact_tokens", "exact_law")
GUARANTEES = (*LOSSLESS, "bounded", "quality_only", "workflow")


@dataclass(slots=True)
class Params:
    """Parameters as the user gave them, all of them as they took effect, and where those come
    from: "paper", "default", "tuned(n)" (the best of n) or "set"."""

    __pydantic_config__ = STRICT

    passed: dict[str, Json] = field(default_factory=dict)
    effective: dict[str, Json] = field(default_factory=dict)
    source: str | None = None

    def __post_init__(self) -> None:
        self.passed, self.effective = current_params(self.passed), current_params(self.effective)


@dataclass(slots=True)
class Steps:
    """Counters of every step, equally long lists: drafted levels and nodes, levels tested and
    accepted, tokens committed (after the cut). relaxed: levels that stand by a lossy accept rule
    alone, which are not among the accepted; null where the rule is lossless."""

    __pydantic_config__ = STRICT

    levels: list[Count] = field(default_factory=list)
    nodes: list[Count] = field(default_factory=list)
    tested: list[Count] = field(default_factory=list)
    accepted: list[Count] = field(default_factory=list)
    committed: list[Count] = field(default_factory=list)
    relaxed: list[Count] | None = None


@dataclass(slots=True)
class Drafted:
    """What was proposed in a step: `tokens`, each one's parent among them (-1: the last committed
    token; null: they are a chain), and those that were committed, root side first."""

    __pydantic_config__ = STRICT

    tokens: list[Count]
    parents: list[int] | None
    path: list[Count]


@dataclass(frozen=True, slots=True)
class ForwardKind:
    """What many forwards of a trace have in common; `layers` is a half-open range, `share` how much
    of the model's weights they read: 1 for a whole forward."""

    __pydantic_config__ = STRICT

    model: str
    role: str
    worker: Count
    batch: Count
    layers: tuple[Count, Count]
    share: Share = 1.0

    def share_of(self, n_layers: int | None) -> float:
        """The share, by which a forward's cost is taken to scale.

        Records before schema 5 do not say it: each of the model's `n_layers` layers counts the same
        (None: unknown).
        """
        first, end = self.layers
        return self.share if self.share < 1 or not n_layers else (end - first) / n_layers


class Forward(Protocol):
    """A metered forward, as the engine records it (read only; the store knows no engine)."""

    @property
    def model(self) -> str: ...
    @property
    def role(self) -> str: ...
    @property
    def worker(self) -> int: ...
    @property
    def batch(self) -> int: ...
    @property
    def layers(self) -> tuple[int, int]: ...
    @property
    def share(self) -> float: ...
    @property
    def n_tokens(self) -> int: ...
    @property
    def t0_ns(self) -> int: ...
    @property
    def t1_ns(self) -> int: ...
    @property
    def used(self) -> bool: ...


class Message(Protocol):
    """A message between two workers, as the engine records it."""

    @property
    def sender(self) -> int: ...
    @property
    def receiver(self) -> int: ...
    @property
    def t0_ns(self) -> int: ...
    @property
    def t1_ns(self) -> int: ...
    @property
    def nbytes(self) -> int: ...


@dataclass(slots=True)
class Trace:
    """Every forward, in columns: forward i is of kind `kinds[kind[i]]` and ran over `n_tokens[i]`
    tokens from `t0_ns[i]` to `t1_ns[i]`, since the timer's start; `unused` lists cancelled ones.
    `messages` between workers: [sender, receiver, t0_ns (sent), t1_ns (read), bytes] each."""

    __pydantic_config__ = STRICT

    kinds: list[ForwardKind] = field(default_factory=list)
    kind: list[Count] = field(default_factory=list)
    n_tokens: list[Count] = field(default_factory=list)
    t0_ns: list[Count] = field(default_factory=list)
    t1_ns: list[Count] = field(default_factory=list)
    unused: list[Count] = field(default_factory=list)
    messages: list[list[Count]] = field(default_factory=list)

    @classmethod
    def pack(cls, forwards: Iterable[Forward], messages: Iterable[Message] = ()) -> Trace:
        """The columns of a sequence of metered forwards, and the messages between workers."""
        trace, index = cls(), dict[ForwardKind, int]()
        for position, f in enumerate(forwards):
            kind = ForwardKind(f.model, f.role, f.worker, f.batch, f.layers, f.share)
            trace.kind.append(index.setdefault(kind, len(index)))
            trace.n_tokens.append(f.n_tokens)
            trace.t0_ns.append(f.t0_ns)
            trace.t1_ns.append(f.t1_ns)
            if not f.used:
                trace.unused.append(position)
        trace.kinds = list(index)
        trace.messages = [[m.sender, m.receiver, m.t0_ns, m.t1_ns, m.nbytes] for m in messages]
        return trace

    @property
    def workers(self) -> int:
        """How many workers computed."""
        return len({kind.worker for kind in self.kinds})

    def counted(self, depth: int | None = None) -> tuple[int, int, float]:
        """Forwards of the target, forwards that draft, and the target's work in whole forwards.

        The target's are its prefills, and of a verification what reaches the last layer; the first
        half of one is neither. Parts of the target that draft do draft, whatever layer they end at.

        Args:
            depth: the target's layers; None: as many as a forward of it ran, which prefill does.
        """
        of_target = [kind.layers[1] for kind in self.kinds if kind.model == "target"]
        depth = max(of_target, default=0) if depth is None else depth
        targets = drafts = 0
        work = 0.0
        for at, kind in enumerate(self.kinds):
            n = self.kind.count(at)
            if kind.model != "target":
                drafts += n
                continue
            work += n * kind.share
            whole = kind.share == 1 and kind.role == "prefill"
            if kind.role == "verify" or whole:
                targets += n * (kind.layers[1] == depth)
            else:
                drafts += n
        return targets, drafts, round(work, 6)


@dataclass(slots=True)
class Ns:
    """Times in nanoseconds. With several workers, draft and verify are busy times and host is what
    is left of decode after their union. learn: the time that learning before this request delayed
    it by; in the total. Null where nothing is learnt.

    Of a batch's records each has an equal share of the batch's times (`Batch`)."""

    __pydantic_config__ = STRICT

    total: Count | None = None
    prefill: Count | None = None
    decode: Count | None = None
    draft: Count | None = None
    verify: Count | None = None
    host: Count | None = None
    learn: Count | None = None


@dataclass(slots=True)
class Verdict:
    """How the output compares with vanilla's.

    kind: one of `VERDICTS`. position: the first index at which the two differ. expected: vanilla's
    token there. gap: what the output's worst token, anywhere, lacks of the best decision score.
    rounding: of a near-tie, whether vanilla's own forward chooses the output's very tokens once it
    reads as many at a time as the method did; null where that was not asked.
    """

    __pydantic_config__ = STRICT

    kind: str
    position: Count | None = None
    gap: Finite | None = None
    expected: Count | None = None
    rounding: bool | None = None


@dataclass(frozen=True, slots=True)
class Likelihood:
    """Drawn tokens under the target's distribution, as transformers' own module says it: the sum of
    their log-probabilities (natural, -12 at least) less what that distribution gives to be
    expected, the variance that it gives, and the logarithms of the moments that `stats.martingale`
    needs."""

    __pydantic_config__ = STRICT

    excess: Finite
    variance: Annotated[Finite, Field(ge=0)]
    cumulants: list[Finite]


@dataclass(slots=True)
class Batch:
    """The sequences that were decoded together, of which a record's is one.

    size: how many there were. place: this one's among them. total: ns from the timer's start to the
    end of the method. finished: ns until this one's last token. at_once: most of them that took
    part in a step, where others joined as these ended; null in records from before: all. arrived,
    first: ns until the request was there, and until its first token; null where all were there.
    load: how they arrived (`poisson:4`), of which a run may have several; null likewise, and in
    records from before.
    """

    __pydantic_config__ = STRICT

    size: Count
    place: Count
    total: Count
    finished: Count
    at_once: Count | None = None
    arrived: Count | None = None
    first: Count | None = None
    load: Name | None = None


Key = tuple[str, int, str, int]
"""What no two records of a run share: prompt, turn, label, pass."""


@dataclass(slots=True, kw_only=True)
class Record:
    """One output; a line of `records.jsonl`, in this order of keys (`pass_` is written "pass").

    drafts: what was proposed in each step; of a sample of prompts, else null.
    energy_j: joules that the machine's counters moved by while it was decoded, of a batch an equal
        share; null where there is no counter (the manifest says why), and of a void or failed one.
    extra: what else a method counted, summed over its steps; null where it counts nothing.
    log_likelihood: of the output under the target's warped distribution, natural, all tokens; null
    where outputs are compared token by token.
    likelihood: how likely a drawn output is, against what was to be expected; null likewise.
    log_probs: natural logarithm of each output token's probability under the target's distribution
    (the warped one where temperature is above 0), to 3 decimals; null where it was not computed.
    target_equivalents: the target's work, in whole forwards of it: parts count as their share.
    version: how often what drafts had learnt before this request; null where nothing is learnt.
    batch: null for a sequence that was decoded alone.
    valid: whether the output belongs to the run's grammar; null where there is none, and of an
        output that the budget cut.
    synthetic: what of the models is made up: weights that were drawn, acceptance that was imposed;
        null where nothing is.
    worker: of a run that was dealt to several, which of them measured it; null elsewhere. Times of
    two workers are of two devices, and in no ratio.
    """

    __pydantic_config__ = STRICT

    schema: Count = SCHEMA
    prompt_id: Name
    cluster: str
    task: Name
    family: Family
    category: str
    turn: Annotated[Count, Field(ge=1)]
    method: Name
    label: Name
    peer: bool
    params: Params
    sampling: str
    guarantee: str
    pass_: Annotated[Count, Field(alias="pass")]
    seed: Count
    output_ids: list[Count] | None
    origin: list[str] | None
    n_tokens: Count | None
    finish: str
    steps: Steps | None
    drafts: list[Drafted] | None = None
    extra: dict[str, Whole | Finite] | None = None
    target_forwards: Count | None
    draft_forwards: Count | None
    target_equivalents: Annotated[Finite, Field(ge=0)] | None = None
    version: Count | None = None
    batch: Batch | None = None
    worker: Name | None = None
    forwards: Trace | None
    ns: Ns
    peak_bytes: Count | None
    energy_j: Annotated[Finite, Field(ge=0)] | None = None
    other_cpu: Share | None
    verdict: Verdict | None
    log_likelihood: LogChance | None = None
    likelihood: Likelihood | None = None
    log_probs: list[LogChance] | None = None
    score: Share | None
    valid: bool | None = None
    synthetic: Name | None = None
    void: bool
    error: Reason | None

    @property
    def unasked(self) -> bool:
        """Return True if the model could not decode the prompt, with any method (`PromptError`)."""
        return self.error is not None and self.error.startswith(f"{PromptError.__name__}: ")

    @property
    def key(self) -> Key:
        return self.prompt_id, self.turn, self.label, self.pass_


def to_json(record: Record) -> str:
    """The record on one line. Raises ValueError on a NaN or an infinity."""
    data = _reader().dump_python(record, warnings="none")  # much faster than `asdict`
    return json.dumps(
        {"pass" if key == "pass_" else key: value for key, value in data.items()},
        allow_nan=False,
        separators=(",", ":"),
    )


def from_json(line: str) -> Record:
    """The record of a line, its types and ranges checked; see `invariants.validate` for the rest.

    Raises:
        UsageError: a schema newer than this program's.
        ValueError: not a record; names the field and its value.
    """
    try:
        record = _reader().validate_json(line)
    except ValidationError as error:
        _refuse_newer(_schema_of(line))
        raise ValueError(first_problem(error)) from None
    _refuse_newer(record.schema)
    return record


@cache
def _reader() -> TypeAdapter[Record]:
    return TypeAdapter(Record)


def _schema_of(line: str) -> object:
    """What a line that is no record of ours says of its schema."""
    try:
        data = json.loads(line)
    except (ValueError, RecursionError):
        return None
    return data.get("schema") if isinstance(data, dict) else None


def _refuse_newer(schema: object) -> None:
    if isinstance(schema, int) and schema > SCHEMA:
        raise UsageError(
            f"this record has schema {schema}; this specbench reads up to {SCHEMA}",
            hint="pip install --upgrade specbench-cli",
        )

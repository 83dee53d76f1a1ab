"""Record of one output: one method, one prompt (a turn of a question), one repeat of the run.

A field is null in these cases. Methods of other programs leave fields null that they cannot report,
but never `ns.total`, `n_tokens` or `output_ids`. A failed output has an `error`, the finish
"error", and otherwise nulls. A noisy output may have no times, but it keeps ids, counters and
verdict. Fields that the machine cannot measure (`peak_bytes`, `other_cpu`) or that the task does
not have (`score`) may always be null.

Reading a line checks the types and ranges of these classes. The module `invariants` checks the
fields against each other. The page docs/reference/records.md is generated from the sections
"Attributes".
"""

from __future__ import annotations

import json
from collections.abc import Iterable
from dataclasses import dataclass, field
from functools import cache
from typing import Annotated, Literal, Protocol, get_args

from pydantic import AfterValidator, ConfigDict, Field, TypeAdapter, ValidationError
from typing_extensions import TypeAliasType

from specbench_cli.config.problems import format_first_problem
from specbench_cli.errors import MAX_TEXT_LENGTH, PromptError, UsageError, to_one_line
from specbench_cli.former_names import current_params

SCHEMA = 9
"""Version of the record written now; every older one stays readable.

Fields that each version added, which are null in older records (no messages, whole forwards):

2: `log_likelihood`, `verdict.rounding`. 3: `params.source`. 4: `forwards.messages`, `log_probs`,
`drafts`, `extra`. 5: `steps.relaxed`, `forwards.kinds.share`, `ns.learn`, `batch`,
`target_equivalents`, `version`. 6: `likelihood`. 7: `worker`. 8: `valid`. 9: `synthetic`,
`energy_j`.
"""

BASELINE = "vanilla"
"""Label of the method that all others are compared with."""

Count = Annotated[int, Field(ge=0, lt=2**63)]
"""Type of counts, ids and times in ns."""
Integer = Annotated[int, Field(ge=-(2**63), lt=2**63)]
Finite = Annotated[float, Field(allow_inf_nan=False)]
LogProb = Annotated[float, Field(le=0, allow_inf_nan=False)]
Share = Annotated[float, Field(ge=0, le=1)]
LOAD_PASS_OFFSET = 1000
"""Offset of a record's repeat number (`pass`) for each further load (`--load`).

Under the first load, repeats are numbered from 1. Under the second load, they start at 1001.
"""

Name = Annotated[str, Field(pattern=r"^[^\p{Cc}\p{Zl}\p{Zp}]+$", max_length=2 * MAX_TEXT_LENGTH)]
"""Name that tables show: not empty, of limited length, without control characters and line breaks.
The limit is twice that of a text, since an id combines a task name and a text of its file."""
Reason = Annotated[str, AfterValidator(to_one_line)]
"""Untrusted text. Runs of older versions may contain longer texts, which are truncated."""
Json = TypeAliasType("Json", "bool | int | Finite | str | list[Json] | dict[str, Json] | None")
"""Any JSON value, without NaN and infinity."""

STRICT = ConfigDict(strict=True, extra="forbid", allow_inf_nan=False)
"""Strict validation: no text in place of a number, no unknown fields, no NaN."""

Family = Literal[
    "multi_turn", "translation", "summarization", "qa", "math_reasoning", "rag", "code", "other"
]
"""Task family of a question: the stratum of all statistics."""
FAMILIES: tuple[Family, ...] = get_args(Family)
FINISHES = ("eos", "length", "stop", "error")
VERDICTS = ("reference", "identical", "near-tie", "mismatch", "unchecked")
LOSSLESS = ("exact_tokens", "exact_law")
GUARANTEES = (*LOSSLESS, "bounded", "quality_only", "workflow")


@dataclass(slots=True)
class Params:
    """Parameters of the method.

    Attributes:
        passed: parameters that the user gave.
        effective: all parameters with the values that the method used.
        source: origin of the parameters: "paper", "default", "tuned(n)" (the best of n candidates)
            or "set" (by the user).
    """

    __pydantic_config__ = STRICT

    passed: dict[str, Json] = field(default_factory=dict)
    effective: dict[str, Json] = field(default_factory=dict)
    source: str | None = None

    def __post_init__(self) -> None:
        self.passed, self.effective = current_params(self.passed), current_params(self.effective)


@dataclass(slots=True)
class Steps:
    """Counters of the decoding steps, one number per step.

    A level is one position of a draft. A chain has one token per level, a tree has several.

    Attributes:
        levels: number of levels in the draft.
        nodes: number of tokens in the draft.
        tested: number of levels that verification reached. It includes the level that was rejected.
        accepted: number of levels that verification accepted.
        committed: number of tokens that were added to the output. Tokens that the stop rule cuts
            off do not count.
        relaxed: number of levels that only a lossy accept rule accepted. They are not counted in
            `accepted`. Null if the method is lossless.
    """

    __pydantic_config__ = STRICT

    levels: list[Count] = field(default_factory=list)
    nodes: list[Count] = field(default_factory=list)
    tested: list[Count] = field(default_factory=list)
    accepted: list[Count] = field(default_factory=list)
    committed: list[Count] = field(default_factory=list)
    relaxed: list[Count] | None = None


@dataclass(slots=True)
class DraftedTokens:
    """Draft of one step.

    Attributes:
        tokens: drafted token ids.
        parents: index of the parent of each token; -1 is the last committed token. Null if the
            draft is a chain.
        path: indices of the draft tokens that were committed, in the order of the text.
    """

    __pydantic_config__ = STRICT

    tokens: list[Count]
    parents: list[int] | None
    path: list[Count]


@dataclass(frozen=True, slots=True)
class ForwardKind:
    """Properties that many forwards of a trace have in common.

    Attributes:
        model: name of the model: target, draft, or the kind of a draft head.
        role: purpose of the forward: prefill, verify or draft.
        worker: number of the worker that ran the forward. The target's worker has number 0.
        batch: number of sequences in the forward.
        layers: index of the first layer, and index after the last layer.
        share: share of the model's weights that the forward reads, without the embedding. A whole
            forward has 1.
    """

    __pydantic_config__ = STRICT

    model: str
    role: str
    worker: Count
    batch: Count
    layers: tuple[Count, Count]
    share: Share = 1.0

    def share_of(self, n_layers: int | None) -> float:
        """Return the share of the model's weights that the forward reads.

        Records before schema 5 do not contain the share. For them, compute it from the number of
        layers.

        Args:
            n_layers: number of layers of the model. None if it is unknown. Then the share is 1.
        """
        first, end = self.layers
        return self.share if self.share < 1 or not n_layers else (end - first) / n_layers


class ForwardRecord(Protocol):
    """Interface of a forward that the engine has timed. This package does not import the engine."""

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


class MessageRecord(Protocol):
    """Interface of a message between two workers of the engine.

    This package does not import the engine.
    """

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
    """All forwards of an output, in columns. Times are in nanoseconds from the start of the timer.

    Attributes:
        kinds: kinds of forwards. A kind is a set of properties that many forwards have in common.
        kind: index of each forward's kind in `kinds`.
        n_tokens: number of input tokens of each forward.
        t0_ns: start of each forward.
        t1_ns: end of each forward.
        unused: indices of the forwards that were cancelled.
        messages: messages between workers, each as [sender, receiver, time sent, time read,
            bytes].
    """

    __pydantic_config__ = STRICT

    kinds: list[ForwardKind] = field(default_factory=list)
    kind: list[Count] = field(default_factory=list)
    n_tokens: list[Count] = field(default_factory=list)
    t0_ns: list[Count] = field(default_factory=list)
    t1_ns: list[Count] = field(default_factory=list)
    unused: list[Count] = field(default_factory=list)
    messages: list[list[Count]] = field(default_factory=list)

    @classmethod
    def pack(
        cls, forwards: Iterable[ForwardRecord], messages: Iterable[MessageRecord] = ()
    ) -> Trace:
        """Return the trace of timed forwards, and of messages between workers."""
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
        """Number of workers that ran a forward."""
        return len({kind.worker for kind in self.kinds})

    def count_forwards(self, depth: int | None = None) -> tuple[int, int, float]:
        """Count target forwards and draft forwards, and sum up the work of the target.

        The unit of work is a whole forward of the target.

        Target forwards are prefills, and verifications that reach the last layer. A verification
        that ends before the last layer counts neither as a target forward nor as a draft forward. A
        partial target forward that drafts counts as a draft forward.

        Args:
            depth: number of layers of the target. If None, it is the deepest layer that a forward
                reached. This is the last layer, because a prefill uses all layers.
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
    """Times in nanoseconds. The times of a batch are divided equally among its records.

    Attributes:
        total: sum of prefill, decode and learn.
        prefill: reading the prompt, until the first token.
        decode: all steps after the first token.
        draft: forwards that draft. With several workers: the time in which at least one of them
            drafts.
        verify: forwards of the target. With several workers: the time in which the target computes.
        host: the rest of the decode time: Python code and kernel launches. With several workers:
            the time in which no worker computes.
        learn: training of the method before this request, which delays this request. Null if the
            method does not learn.
    """

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
    """Comparison of the output with vanilla's output.

    Attributes:
        kind: reference (vanilla's own output), identical, near-tie, mismatch or unchecked.
        position: first index at which the output and vanilla's output differ.
        gap: largest difference between the best score and the score of a token of the output.
        expected: vanilla's token at `position`.
        rounding: for a near-tie, whether the number of tokens per forward explains it. True if
            vanilla's decoder chooses the output's tokens when its forwards are as wide as the
            method's forwards. Null if this was not checked.
    """

    __pydantic_config__ = STRICT

    kind: str
    position: Count | None = None
    gap: Finite | None = None
    expected: Count | None = None
    rounding: bool | None = None


@dataclass(frozen=True, slots=True)
class Likelihood:
    """Likelihood of a sampled output under the target's distribution, as transformers computes it.

    Attributes:
        excess: sum of the natural log-probabilities of the tokens, minus the expected sum. A
            log-probability below -12 counts as -12.
        variance: variance of the sum of the log-probabilities.
        cumulants: logarithms of the moments that the test of `stats.martingale` needs.
    """

    __pydantic_config__ = STRICT

    excess: Finite
    variance: Annotated[Finite, Field(ge=0)]
    cumulants: list[Finite]


@dataclass(slots=True)
class BatchMembership:
    """Batch of sequences in which this output was decoded. Times are in ns from the timer's start.

    Attributes:
        size: number of sequences in the batch.
        place: index of this output's sequence in the batch.
        total: time until all sequences ended.
        finished: time until the last token of this output.
        at_once: largest number of sequences in one step. A new sequence joins when another one
            ends. Null in older records, in which all sequences were in every step.
        arrived: time until the request arrived. Null without `--load`.
        first: time until the first token of this output. Null without `--load`.
        load: arrivals of the requests, as a value of `--load` such as `poisson:4`. Null without
            `--load`.
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


RecordKey = tuple[str, int, str, int]
"""Unique key of a record in its run: prompt, turn, label, repeat."""


@dataclass(slots=True, kw_only=True)
class Record:
    """One output: a line of `records.jsonl`.

    The attributes are the keys of the line, in this order. The key of `pass_` is "pass".

    Attributes:
        schema: version of the format. Fields that are missing in an older record are null.
        prompt_id: id of the question.
        cluster: group of similar questions, which are not independent. Statistics resample whole
            clusters.
        task: name of the task.
        family: task family. Statistics treat each family as a stratum.
        category: category of the question in its task.
        turn: turn of the question, from 1.
        method: name of the method.
        label: name of the configured method in this run. One method may run with several settings.
        peer: true for methods of other programs, whose names begin with `hf:` or `engine:`.
        params: parameters of the method.
        sampling: decoding rule: greedy, rejection, block, coupled or replay.
        guarantee: promise of the method about its output under the decoding rule in `sampling`.
        pass_: repeat of the run, from 1. A process that measures several loads adds 1000 for each
            further load.
        seed: random seed.
        output_ids: token ids of the output.
        origin: source of each token: prefill, accepted, relaxed, recovered, bonus, or plain (a step
            without a draft).
        n_tokens: number of output tokens.
        finish: reason for the end: eos, length, stop or error.
        steps: counters of the steps.
        drafts: draft of each step. Only the first question of each family has drafts, and only in
            the first repeat. Otherwise null.
        extra: further counters of the method, summed over its steps.
        target_forwards: forwards of the target: prefill and verifications.
        draft_forwards: forwards that draft. Partial forwards of the target that draft are included.
        target_equivalents: work of the target, in units of a whole forward. A partial forward
            counts as its share of the weights. Null for methods of other programs.
        version: number of times that the method learned before this request. Null if the method
            does not learn.
        batch: the batch in which the output was decoded. Null if the output was decoded alone.
        worker: worker of a cluster that measured the output (`--executor ray`). Times of two
            workers are never compared.
        forwards: trace of all forwards.
        ns: times.
        peak_bytes: peak memory during decoding.
        energy_j: energy in joules, by the machine's counters. A batch is divided equally. Null if
            there is no counter, and for a noisy or failed output.
        other_cpu: share of the machine's CPU time that other programs used during the measurement.
        verdict: comparison with vanilla's output.
        log_likelihood: natural logarithm of the output's probability under the target's
            distribution (with temperature, top-k and top-p). Null if outputs are compared token by
            token.
        likelihood: test of a sampled output against the target's distribution. Null if outputs are
            compared token by token.
        log_probs: natural logarithm of each output token's probability under the target's
            distribution, to 3 decimals. Computed after decoding, by one forward.
        score: score of the answer, from 0 to 1. Null if the task has no scorer.
        valid: true if the output matches the run's grammar. Null without a grammar, and for an
            output that the token limit cut.
        synthetic: artificial parts of the models: random weights or a simulated acceptance rate.
            Null if there are none.
        void: true if the machine was not quiet. Then ids and counters are valid, but times are not
            used.
        error: reason why there is no output.
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
    drafts: list[DraftedTokens] | None = None
    extra: dict[str, Integer | Finite] | None = None
    target_forwards: Count | None
    draft_forwards: Count | None
    target_equivalents: Annotated[Finite, Field(ge=0)] | None = None
    version: Count | None = None
    batch: BatchMembership | None = None
    worker: Name | None = None
    forwards: Trace | None
    ns: Ns
    peak_bytes: Count | None
    energy_j: Annotated[Finite, Field(ge=0)] | None = None
    other_cpu: Share | None
    verdict: Verdict | None
    log_likelihood: LogProb | None = None
    likelihood: Likelihood | None = None
    log_probs: list[LogProb] | None = None
    score: Share | None
    valid: bool | None = None
    synthetic: Name | None = None
    void: bool
    error: Reason | None

    @property
    def has_prompt_error(self) -> bool:
        """Return True if the model could not decode the prompt with any method (`PromptError`)."""
        return self.error is not None and self.error.startswith(f"{PromptError.__name__}: ")

    @property
    def key(self) -> RecordKey:
        return self.prompt_id, self.turn, self.label, self.pass_


def to_json(record: Record) -> str:
    """Return the record as one line of JSON. Raise ValueError for NaN or infinity."""
    data = _record_adapter().dump_python(record, warnings="none")  # much faster than `asdict`
    return json.dumps(
        {"pass" if key == "pass_" else key: value for key, value in data.items()},
        allow_nan=False,
        separators=(",", ":"),
    )


def from_json(line: str) -> Record:
    """Parse a line and check types and ranges. `invariants.validate` checks the other rules.

    Raises:
        UsageError: the schema is newer than the newest schema that this program can read.
        ValueError: the line is not a record. The message names the field and its value.
    """
    try:
        record = _record_adapter().validate_json(line)
    except ValidationError as error:
        _check_schema(_read_schema(line))
        raise ValueError(format_first_problem(error)) from None
    _check_schema(record.schema)
    return record


@cache
def _record_adapter() -> TypeAdapter[Record]:
    return TypeAdapter(Record)


def _read_schema(line: str) -> object:
    """Return the schema version in a line that is not a valid record.

    Return None if it has none.
    """
    try:
        data = json.loads(line)
    except (ValueError, RecursionError):
        return None
    return data.get("schema") if isinstance(data, dict) else None


def _check_schema(schema: object) -> None:
    if isinstance(schema, int) and schema > SCHEMA:
        raise UsageError(
            f"this record has schema {schema}; this specbench reads up to {SCHEMA}",
            hint="pip install --upgrade specbench-cli",
        )

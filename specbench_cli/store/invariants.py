"""Checks of a record: its fields must agree with each other and with its run.

specbench runs these checks before it writes a record, and when it reads one.
"""

from __future__ import annotations

import math
from collections.abc import Collection, Mapping
from dataclasses import dataclass, field, fields
from itertools import compress
from operator import le

from specbench_cli.stats.martingale import TILTS
from specbench_cli.store.schema import (
    FINISHES,
    GUARANTEES,
    LOAD_PASS_OFFSET,
    LOSSLESS,
    VERDICTS,
    Ns,
    Record,
    Steps,
    Trace,
    Verdict,
)


def validate(record: Record, vocabulary: int | None = None) -> None:
    """Check that the fields of a record do not contradict each other.

    Args:
        vocabulary: the target's vocabulary size. None skips the check of token ids.

    Raises:
        ValueError: the record breaks a rule. The message names the field.
    """
    _ensure_one_of("finish", record.finish, FINISHES)
    _ensure_one_of("guarantee", record.guarantee, GUARANTEES)
    _ensure((record.finish == "error") == (record.error is not None), "finish", "error text")
    timed = record.error is None and not record.void
    _ensure(record.energy_j is None or timed, "energy_j", "given for a noisy or failed output")
    if record.error is not None:
        return
    verdict = record.verdict
    _ensure(verdict is not None, "verdict", "missing")
    if verdict is not None:
        _ensure_one_of("verdict.kind", verdict.kind, VERDICTS)
        _validate_verdict(verdict, record.output_ids or [])
    likelihood = record.log_likelihood
    _ensure(likelihood is None or -math.inf < likelihood <= 0, "log_likelihood", "not -inf..0")
    if (found := record.likelihood) is not None:
        numbers = (found.excess, found.variance, *found.cumulants)
        right = all(map(math.isfinite, numbers)) and found.variance >= 0
        _ensure(right and len(found.cumulants) == len(TILTS), "likelihood", "not its numbers")
    _ensure(record.score is None or 0 <= record.score <= 1, "score", "outside 0..1")
    complete = record.valid is None or record.finish == "eos"
    _ensure(complete, "valid", "given for an output that did not end with EOS")
    if not record.peer:
        for name in ("origin", "steps", "target_forwards", "draft_forwards", "forwards"):
            _ensure(getattr(record, name) is not None, name, "missing")
    if record.forwards is not None:
        _validate_columns(record.forwards)
    counted = None if record.forwards is None else record.forwards.count_forwards()
    _validate_batch(record, counted)
    _validate_tokens(record)
    if vocabulary is not None:
        _validate_ids(record, vocabulary)
    _validate_drafts(record)
    _validate_times(record)
    _validate_messages(record)
    _validate_steps(record)
    if not record.peer:
        _validate_trace(record, counted)


ForwardCounts = tuple[int, int, float]
"""Result of `Trace.count_forwards`: target forwards, draft forwards, and the target's work in whole
forwards."""

PromptFacts = tuple[str, str, str, str]
"""Task, cluster, family and category of a prompt."""


@dataclass(frozen=True, slots=True)
class RunFacts:
    """Facts about a run that its records must agree with. They come from its manifest and prompts.

    If the manifest does not have a fact, its field is empty.

    methods: label -> method name. The name is None if it is not known.
    tasks: names of the tasks.
    prompts: (prompt id, turn) -> task, cluster, family and category.
    workers: names of the workers of a cluster.
    repeats, loads: number of repeats, and number of loads (values of --load). None if unknown.
    seed: random seed. None if unknown.
    """

    methods: Mapping[str, str | None] = field(default_factory=dict)
    tasks: Collection[str] = ()
    prompts: Mapping[tuple[str, int], PromptFacts] = field(default_factory=dict)
    workers: Collection[str] = ()
    repeats: int | None = None
    loads: int | None = None
    seed: int | None = None

    def check_plan(self, pass_: int, seed: int) -> None:
        """Raise ValueError if the run does not have this repeat number or this random seed."""
        load, repeat = divmod(pass_, LOAD_PASS_OFFSET)
        if self.repeats is not None:
            planned = f"{pass_}, but the run has {self.repeats} repeats"
            _ensure(1 <= repeat <= self.repeats, "pass", planned)
        if self.loads is not None:
            _ensure(load < self.loads, "pass", f"{pass_}, but the run has {self.loads} loads")
        _ensure(self.seed in (None, seed), "seed", f"{seed}, but the run has seed {self.seed}")

    def check(self, record: Record) -> None:
        """Raise ValueError if a record does not belong to this run. The message names the field."""
        self.check_plan(record.pass_, record.seed)
        if self.methods:
            known = record.label in self.methods
            _ensure(known, "label", f"{record.label!r} is not a method of the run")
            method = self.methods[record.label]
            problem = f"{record.method!r}, but {method!r} in the manifest"
            _ensure(method in (None, record.method), "method", problem)
        if self.tasks:
            _ensure(record.task in self.tasks, "task", f"{record.task!r} is not a task of the run")
        if self.prompts:
            expected = self.prompts.get((record.prompt_id, record.turn))
            what = f"{record.prompt_id!r}, turn {record.turn}"
            _ensure(expected is not None, "prompt_id", f"{what} is not in prompts.jsonl")
            _ensure(
                expected == _prompt_facts(record),
                "prompt_id",
                f"{what} is {expected} in prompts.jsonl",
            )
        if record.worker is not None:
            is_worker = record.worker in self.workers
            _ensure(is_worker, "worker", f"{record.worker!r} is not a worker of the run")


SharedFacts = tuple[tuple[str, tuple[object, ...]], ...]
"""Pairs of a subject (a prompt or a method) and its facts."""


def shared_facts(record: Record) -> SharedFacts:
    """Return facts that all records of the same prompt, or of the same method, must share."""
    return (
        (f"prompt {record.prompt_id}", _prompt_facts(record)),
        (f"row {record.label}", (record.method, record.peer)),
    )


def check_agreement(facts: SharedFacts, earlier: dict[str, tuple[object, ...]]) -> None:
    """Check that a record agrees with earlier records about its prompt and its method.

    Args:
        facts: facts of the record: pairs of a subject (a prompt or a method) and its facts.
        earlier: facts of earlier records, by subject. New subjects are added.

    Raises:
        ValueError: the record disagrees. The message names the prompt or the method.
    """
    for subject, values in facts:
        before = earlier.setdefault(subject, values)
        _ensure(before == values, subject, f"{values}, but {before} in an earlier record")


def _prompt_facts(record: Record) -> PromptFacts:
    return record.task, record.cluster, record.family, record.category


def _validate_verdict(verdict: Verdict, ids: list[int]) -> None:
    gap, position = verdict.gap, verdict.position
    _ensure(gap is None or (math.isfinite(gap) and gap >= 0), "verdict.gap", "not 0 or more")
    differs = verdict.kind in ("near-tie", "mismatch")
    _ensure(differs or verdict.expected is None, "verdict.expected", "given, but nothing differs")
    wrong = "given" if position is not None else "missing"
    _ensure((position is not None) == differs, "verdict.position", f"{wrong} for {verdict.kind}")
    if position is not None:
        _ensure(position <= len(ids), "verdict.position", "after the last token")
        same = ids[position : position + 1] == [verdict.expected]
        _ensure(not same, "verdict.expected", "equal to the token of the output")


def _validate_ids(record: Record, vocabulary: int) -> None:
    """Raise ValueError if a token id is not in the target's vocabulary."""
    columns = [("output_ids", record.output_ids or ())]
    columns += [("drafts.tokens", drafted.tokens) for drafted in record.drafts or ()]
    for name, ids in columns:
        largest = max(ids, default=0)
        _ensure(largest < vocabulary, name, f"{largest}, but the target has {vocabulary} tokens")


def _validate_tokens(record: Record) -> None:
    n, ids, steps = record.n_tokens, record.output_ids, record.steps
    if n is None or ids is None:
        raise ValueError("n_tokens, output_ids: missing")
    _ensure(len(ids) == n, "output_ids", f"{len(ids)} ids for {n} tokens")
    log_probs = record.log_probs
    if log_probs is not None:
        _ensure(len(log_probs) == n, "log_probs", f"{len(log_probs)} entries for {n} tokens")
        _ensure(all(-math.inf < each <= 0 for each in log_probs), "log_probs", "not -inf..0")
    if record.origin is not None:
        _ensure(len(record.origin) == n, "origin", f"{len(record.origin)} entries for {n} tokens")
    if steps is None:
        return
    for f in fields(steps):
        column = getattr(steps, f.name)
        if column is None and f.name == "relaxed":
            continue
        length = len(column)
        _ensure(length == len(steps.levels), f"steps.{f.name}", "not as long as steps.levels")
    _ensure(all(map(le, steps.levels, steps.nodes)), "steps.nodes", "fewer nodes than levels")
    ordered = all(map(le, steps.accepted, steps.tested)) and all(
        map(le, steps.tested, steps.levels)
    )
    _ensure(ordered, "steps.tested", "not accepted <= tested <= levels")
    within = all(map(le, steps.accepted, steps.committed))
    _ensure(within, "steps.committed", "fewer committed than accepted")
    for at, relaxed in enumerate(steps.relaxed or ()):
        kept = steps.accepted[at] + relaxed
        _ensure(relaxed >= 0 and kept <= steps.tested[at], "steps.relaxed", "more than tested")
        _ensure(kept <= steps.committed[at], "steps.relaxed", "more than committed")
    if n > 0:
        total = 1 + sum(steps.committed)
        _ensure(total == n, "steps.committed", f"1 + their sum is {total}, not n_tokens = {n}")


def _validate_steps(record: Record) -> None:
    """Raise ValueError if the counters of the steps contradict the field `origin`.

    The field `origin` has the source of each token.
    """
    steps, origin = record.steps, record.origin
    if steps is None or origin is None:
        return
    _ensure(origin[:1] == ["prefill"], "origin", "the first token is not prefill's")
    at, last = 1, len(steps.levels) - 1
    none = [0] * (last + 1)
    lossy = steps.relaxed is not None or "relaxed" in origin
    columns = zip(
        *(steps.levels, steps.nodes, steps.tested, steps.accepted, steps.committed),
        steps.relaxed or none,
        strict=True,
    )
    for step, (levels, nodes, tested, accepted, committed, relaxed) in enumerate(columns):
        drafted = levels or nodes or tested or accepted or relaxed or committed != 1
        if not drafted and origin[at : at + 1] not in (["accepted"], ["relaxed"]):
            at += 1  # a step without a draft, as in vanilla
            continue
        words, kept = origin[at : at + committed], accepted + relaxed
        at += committed
        right = (
            words.count("accepted") == accepted
            and "accepted" not in words[kept:]
            and not (lossy and (words.count("relaxed") != relaxed or "relaxed" in words[kept:]))
            and (levels == 0) == (nodes == 0)
            and tested <= kept + 1
            and 1 <= committed <= kept + 1
            and (committed == kept + 1 or kept == levels or step == last)
        )
        if not right:
            _reject_step(steps, step, words)


def _reject_step(steps: Steps, step: int, words: list[str]) -> None:
    """Raise the ValueError for an invalid step. The message names the rule that the step breaks.

    Args:
        step: index of the step.
        words: source of each token that the step generated.
    """
    levels, accepted, committed = steps.levels[step], steps.accepted[step], steps.committed[step]
    relaxed = 0 if steps.relaxed is None else steps.relaxed[step]
    kept, where = accepted + relaxed, f"step {step + 1}"
    counts = {"accepted": accepted, "relaxed": relaxed}
    for word, n in counts.items():
        found = words.count(word)
        _ensure(found == n, f"steps.{word}", f"{where} has {n}, but origin has {found}")
    in_order = all(word in counts for word in words[:kept])
    _ensure(in_order, "origin", f"in {where}, an accepted token follows one that is not")
    same = (levels == 0) == (steps.nodes[step] == 0)
    _ensure(same, "steps.levels", f"{where} has levels without nodes, or nodes without levels")
    few = steps.tested[step] <= kept + 1
    _ensure(few, "steps.tested", f"{where} has a tested level after a rejected one")
    _ensure(committed >= 1, "steps.committed", f"{where} has no committed token")
    few = committed <= kept + 1
    _ensure(few, "steps.committed", f"{where} has more than one token after the accepted ones")
    _ensure(False, "steps.committed", f"{where} has no token after a rejected one")


def _validate_columns(trace: Trace) -> None:
    """Raise ValueError if the columns of a trace have different lengths or impossible values."""
    n = len(trace.kind)
    for f in ("n_tokens", "t0_ns", "t1_ns"):
        _ensure(len(getattr(trace, f)) == n, f"forwards.{f}", "not as long as forwards.kind")
    _ensure(max(trace.kind, default=-1) < len(trace.kinds), "forwards.kind", "no such kind")
    _ensure(max(trace.unused, default=-1) < n, "forwards.unused", "no such forward")
    _ensure(all(map(le, trace.t0_ns, trace.t1_ns)), "forwards.t1_ns", "ended before it began")
    for kind in trace.kinds:
        _ensure(kind.layers[0] <= kind.layers[1], "forwards.kinds.layers", "end before they begin")


def _validate_trace(record: Record, counted: ForwardCounts | None) -> None:
    """Raise ValueError if the trace of forwards contradicts the other counters of the record."""
    trace, steps = record.forwards, record.steps
    if trace is None or steps is None or counted is None:
        return
    targets, drafts, _ = counted
    for name, count in (("target_forwards", targets), ("draft_forwards", drafts)):
        recorded = getattr(record, name)
        _ensure(recorded == count, name, f"{recorded}, but the trace has {count}")
    needed = len(steps.levels) + 1
    if record.guarantee not in LOSSLESS and all(kind.model != "target" for kind in trace.kinds):
        # No target forward: the method is the draft model alone. It needs one draft forward per
        # token.
        _ensure(drafts >= needed, "draft_forwards", f"{drafts}, but the tokens need {needed}")
        return
    enough = targets >= needed
    _ensure(enough, "target_forwards", f"{targets}, but prefill and steps need {needed}")
    depth = max((kind.layers[1] for kind in trace.kinds if kind.model == "target"), default=0)
    scores = [
        k.model == "target" and (k.role, k.layers[1]) == ("verify", depth) for k in trace.kinds
    ]
    rows = sum(compress(trace.n_tokens, map(scores.__getitem__, trace.kind)))
    nodes = sum(steps.nodes)
    _ensure(rows >= nodes, "steps.nodes", f"{nodes} in total, but the target scored {rows} rows")


def _validate_drafts(record: Record) -> None:
    if record.extra is not None:
        _ensure(all(map(math.isfinite, record.extra.values())), "extra", "not finite")
    if record.drafts is None:
        return
    steps = record.steps
    if steps is None:
        raise ValueError("drafts: without steps")
    _ensure(len(record.drafts) == len(steps.nodes), "drafts", "not as long as steps")
    for drafted, nodes, committed in zip(record.drafts, steps.nodes, steps.committed, strict=True):
        _ensure(len(drafted.tokens) == nodes, "drafts.tokens", "not as many as steps.nodes")
        if drafted.parents is not None:
            _ensure(len(drafted.parents) == nodes, "drafts.parents", "not as many as tokens")
            earlier = all(-1 <= parent < at for at, parent in enumerate(drafted.parents))
            _ensure(earlier, "drafts.parents", "a parent does not come before its child")
        _ensure(all(0 <= node < nodes for node in drafted.path), "drafts.path", "no such token")
        _ensure(len(drafted.path) <= committed, "drafts.path", "more than were committed")


def _validate_batch(record: Record, counted: ForwardCounts | None) -> None:
    _ensure(record.version is None or record.version >= 0, "version", "negative")
    batch, work = record.batch, record.target_equivalents
    if work is not None:
        _ensure(math.isfinite(work) and work >= 0, "target_equivalents", "not 0 or more")
        if counted is not None and batch is None:
            same = abs(work - counted[2]) < 1e-3
            _ensure(same, "target_equivalents", "not the sum of their shares")
    for kind in record.forwards.kinds if record.forwards is not None else ():
        _ensure(0 <= kind.share <= 1, "forwards.kinds.share", "not within 0..1")
    if batch is not None:
        _ensure(0 <= batch.place < batch.size, "batch.place", "not below its size")
        _ensure(0 < batch.finished <= batch.total, "batch.finished", "not within the total")
        at_once = batch.size if batch.at_once is None else batch.at_once
        _ensure(0 < at_once <= batch.size, "batch.at_once", "not within its size")
        if batch.arrived is not None and batch.first is not None and record.error is None:
            ordered = 0 <= batch.arrived < batch.first <= batch.finished
            _ensure(ordered, "batch.first", "not between its arrival and its last token")


def _validate_messages(record: Record) -> None:
    for message in record.forwards.messages if record.forwards is not None else ():
        _ensure(len(message) == 5, "forwards.messages", "not [from, to, sent, read, bytes]")
        sender, receiver, t0, t1, nbytes = message
        _ensure(min(sender, receiver, nbytes) >= 0, "forwards.messages", "a negative number")
        _ensure(sender != receiver, "forwards.messages", "from a worker to itself")
        _ensure(t0 <= t1, "forwards.messages", "read before it was sent")


def _validate_times(record: Record) -> None:
    ns = record.ns
    if record.void and ns == Ns():
        return
    _ensure(ns.total is not None, "ns.total", "missing")
    _ensure(ns.learn is None or ns.learn >= 0, "ns.learn", "negative")
    if not record.peer:
        for f in fields(ns):
            missing = getattr(ns, f.name) is None and f.name != "learn"
            _ensure(not missing, f"ns.{f.name}", "missing")
    if record.forwards is not None and record.forwards.workers > 1:
        return
    if ns.total is not None and ns.prefill is not None and ns.decode is not None:
        whole = (ns.learn or 0) + ns.prefill + ns.decode
        _ensure(whole == ns.total, "ns.total", "not learn + prefill + decode")
    parts = (ns.draft, ns.verify, ns.host)
    if ns.decode is not None and None not in parts:
        spent = sum(part for part in parts if part is not None)
        _ensure(spent == ns.decode, "ns.decode", "not draft + verify + host")


def _ensure(holds: bool, name: str, why: str) -> None:
    if not holds:
        raise ValueError(f"{name}: {why}")


def _ensure_one_of(name: str, value: str, allowed: tuple[str, ...]) -> None:
    _ensure(value in allowed, name, f"{value!r} is none of {', '.join(allowed)}")

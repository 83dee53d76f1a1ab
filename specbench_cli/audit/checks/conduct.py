"""What a method leaves behind after every step: states that tell the truth, counts that add up."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace

import torch

from specbench_cli.audit.cases import RULES, Case, make_sampling, random_cases
from specbench_cli.audit.checks.tokens import long_of
from specbench_cli.audit.finding import Finding, Problem
from specbench_cli.audit.models.head import TableHead, features_out_of_place
from specbench_cli.audit.models.observed_session import ObservedSession
from specbench_cli.audit.models.table import pair, rows_out_of_place
from specbench_cli.audit.reference import Reference
from specbench_cli.audit.subject import AuditSubject, format_params, max_draft_levels
from specbench_cli.engine.method import Method
from specbench_cli.engine.params import MethodParams
from specbench_cli.engine.partial import Partial
from specbench_cli.engine.spans.judge import SegmentRule
from specbench_cli.engine.spans.token_accounting import unsettled_tokens
from specbench_cli.engine.types import Step
from specbench_cli.engine.verify.accept import AcceptRule
from specbench_cli.engine.verify.tree import ROOT
from specbench_cli.engine.watch import ReportedStep, find_misreport
from specbench_cli.store.invariants import validate
from specbench_cli.store.schema import Ns, Params, Record, Steps, Trace, Verdict

CASES = 12
"""Random tables for each variant and rule."""

VARIED = 4
"""The same for each of the parameters that are the defaults but for one."""

LEVELS = 1_000
"""Levels of a draft that outputs have room for, at most."""

ROUNDS = 4
"""Whole drafts that an output of a pair has room for, whose draft is near or a twin."""


LOOK_AT_STATES = (
    "`observe`, which must take rejected tokens out of the method's states (`state.rollback`; of a"
    " head's all that was drafted, `levels.drop`), and what `propose` feeds:"
    " `session.pending_tokens(state.length())`, a head"
    " `session.pending_features`, nothing left out; a drafter beside"
    " the target: what it is told after each step, and `desk.text`, of which its states hold rows"
)
LOOK_AT_COUNTS = (
    "`Outcome` and `Draft` if the method makes its own: path, origin and tested are counted from"
    " them; a step tells the whole draft that `session.score` had (what is scored beside it is"
    " said there, `proposed=`) and what `session.commit` returned; a draft has at most `limit`"
    " levels, and full acceptance adds a bonus token"
)
LOOK_AT_CLOCK = (
    "what the method runs beside `session.target`, `session.draft()`, `session.partial(...)` and"
    " `session.artifact(...)`, which are metered: a decoder under its wrapper, a copy's `module`"
    " outside of `learn`, threads of its own; a drafter beside the target is hired"
    " (`session.start_worker`); `session.harness` is the measuring program's"
)
LOOK_AT_RULE = (
    "the accept rule and who asks it: the lossless rule comes first ('accepted'), what it rejects"
    " and the rule lets pass at its parent's distribution is 'relaxed' (`session.verify`)"
)


def check_conduct(subject: AuditSubject) -> list[Finding]:
    """States of target and draft, and counters, after every step of many decodings."""
    steps, rows = 0, 0
    state: Problem | None = None
    count: Problem | None = None
    clock: Problem | None = None
    for params, case in cases(subject):
        method = subject.method(params)
        session = case.open(**case.warm_up(method))
        taken: list[Step] = []
        where = f"{format_params(params)}; {case}"
        judged = Judged.of(method, case)
        beside = None
        for step in method.generate(session):
            taken.append(step)
            steps += 1
            beside = beside or session.watch.find_helpers()
            rows += sum(held.length() for _, held, _ in session.states())
            at = f"step {len(taken)} of {where}"
            wrong = _wrong_state(session) or _wrong_desk(session, step)
            state = Problem(wrong, at, LOOK_AT_STATES) if wrong else None
            wrong = _wrong_count(session, step, len(taken), bonus=subject.method.bonus)
            count = Problem(wrong, at, LOOK_AT_COUNTS) if wrong else None
            if judged is not None and not count:
                wrong = judged.wrong(session, step)
                count = Problem(wrong, at, LOOK_AT_RULE) if wrong else None
            if state or count:
                break  # what comes after a wrong state says nothing
        else:
            wrong = _wrong_record(session, taken, subject.name, ruled=judged is not None)
            wrong = wrong or _wrong_ledger(session, taken)
            count = Problem(wrong, where, LOOK_AT_COUNTS) if wrong else None
        wrong = beside or session.find_contradiction()
        clock = Problem(wrong, where, LOOK_AT_CLOCK) if wrong else None
        if state or count or clock:
            break
    return [
        Finding("states", state is None, {"rows": rows, "steps": steps}, state),
        Finding("counters", count is None, {"steps": steps}, count),
        Finding("clock", clock is None, {"steps": steps}, clock),
    ]


def cases(subject: AuditSubject) -> Iterator[tuple[MethodParams, Case]]:
    """What is decoded: every parameter under every rule, short and long."""
    for rule in RULES:
        for params in subject.variants:
            levels = min(max_draft_levels(params, default=5), LEVELS)
            for case in random_cases(rule, CASES, levels):
                yield params, replace(case, eos=(2,), budget=max(case.budget, levels))
            for turn, kind in enumerate(("equal", "near")):
                sampling = make_sampling(rule, turn)
                yield params, Case(kind, pair(kind, 5), sampling, budget=ROUNDS * levels + 1)
        for params in subject.variants[:2]:
            yield params, long_of(subject, rule)
        for params in subject.single_changes:
            levels = min(max_draft_levels(params, default=5), LEVELS)
            for case in random_cases(rule, VARIED, levels):
                yield params, replace(case, budget=max(case.budget, levels))


def _wrong_state(session: ObservedSession) -> str | None:
    """The target holds all committed tokens but the last; another model a prefix of these.

    A head's rows are of the target's features: what it made of its own during a draft must go.
    """
    text = session.tokens()[:-1]
    for decoder, state in session.model_states:
        part = decoder.attention_layers if isinstance(decoder, Partial) else None
        behind = decoder.name != "target"
        wrong = rows_out_of_place(state, text, decoder.first, layers=part, behind=behind)
        if wrong is None and isinstance(decoder, TableHead):
            wrong = features_out_of_place(state, text, decoder.target)
        if wrong is not None:
            return f"the {decoder.name}'s state: {wrong}"
    if session.state.length() != len(text):
        return f"the target's state: {session.state.length()} rows for {len(text)} committed tokens"
    return None


def _wrong_desk(session: ObservedSession, step: Step) -> str | None:
    """A drafter beside the target has been told at least what was committed before the step; its
    states hold the text that it goes by, and behind that what they like."""
    told = session.tokens()[: len(session.tokens()) - len(step.outcome.committed)]
    for desk in session.desks():
        if desk.text[: len(told)] != told:
            return f"its drafter goes by {desk.text} where the text is {told}"
        for decoder, state in desk.states:
            wrong = rows_out_of_place(state, desk.text, decoder.first, beyond=True)
            if wrong is not None:
                return f"the state of its drafter's {decoder.name}: {wrong}"
    return None


def _wrong_count(session: ObservedSession, step: Step, steps: int, *, bonus: bool) -> str | None:
    """What does not add up in a step, just committed, or is told otherwise than it was; None if
    nothing is.

    Args:
        steps: how many there were, this one included.
        bonus: whether a token follows a draft that stands as a whole.
    """
    outcome, draft, seen = step.outcome, step.draft, session.harness.step_records
    if len(seen) != steps:
        return f"drafts were scored for {len(seen)} steps so far"
    ends = session.finish is not None
    wrong = find_misreport(seen[-1], ReportedStep.of(step), bonus=bonus, last=ends)
    if wrong is not None:
        return wrong
    assert draft is not None
    stand, levels, n = len(outcome.path), draft.levels, len(outcome.committed)
    room = session.max_draft_length() + n + (not bonus)
    if levels > room:
        return f"{levels} levels drafted where at most {max(room, 0)} are of use"
    if list(session.tokens()[-n:]) != list(outcome.committed):
        return f"{outcome.committed} reported, {session.tokens()[-n:]} in the text"
    due = stand + (bonus or stand < levels or not levels)
    if not ends and n != due:
        return f"{n} tokens committed after {stand} of {levels} accepted: {due} are due"
    if not any(f.model == "target" and f.role != "draft" for f in step.forwards):
        return "no forward of the target but drafting ones belongs to the step"
    return None


@dataclass(frozen=True)
class Judged:
    """What an accept rule must have done in a step, by the target's table.

    Attributes:
        rule: one that is on.
        noise: by output position.
        prompt: its length.
        draws: whether the lossless rule draws: then no table says which token it takes.
    """

    rule: AcceptRule
    reference: Reference
    noise: Sequence[Sequence[float]]
    prompt: int
    draws: bool

    @classmethod
    def of(cls, method: Method, case: Case) -> Judged | None:
        """None for a method without one."""
        if method.accept is None or method.accept.is_exact:
            return None
        reference = Reference(case.tables[0], case.sampling)
        noise = reference.noise(case.prompt_id, case.budget)
        return cls(method.accept, reference, noise, len(case.prompt), case.sampling.draws)

    def wrong(self, session: ObservedSession, step: Step) -> str | None:
        """Which token is told as accepted or as relaxed and is not, or rejected and passes."""
        text = session.tokens()
        first = len(text) - len(step.outcome.committed)
        if (
            isinstance(self.rule, SegmentRule)
            and (wrong := _misjudged(self.rule, step)) is not None
        ):
            return wrong
        for at, word in enumerate(step.outcome.origin, start=first):
            before, last, token = text[at - 2 : at + 1]
            where = f"behind {before} {last}"
            if word in ("accepted", "relaxed") and not self.draws:
                due = self.reference.choose_token(before, last, self.noise[at - self.prompt])
                if (token == due) != (word == "accepted"):
                    return f"{token} {where} is {word!r} where the target says {due}"
            pure = self.rule.pure
            if word == "relaxed" and pure and not self._passes(before, last, token):
                return f"{token} {where} is relaxed, and {self.rule} does not let it pass"
            for each in _tested(step) if word == "recovered" else ():
                if self._more_pass_stricter(before, last, each):
                    return (
                        f"{each} {where}: {self.rule.stricter} lets it pass and {self.rule}, which"
                        " is to let pass all that it does, does not"
                    )
                sure = self.rule.chance == 1 and pure
                if sure and self._passes(before, last, each):
                    return f"{each} {where} is rejected, and {self.rule} lets it pass"
        return None

    def _passes(self, before: int, last: int, token: int, rule: AcceptRule | None = None) -> bool:
        """Whether a rule, this one unless given, lets a token pass by the target's own
        distribution."""
        p = torch.tensor([self.reference.accept_rule_probs(before, last)], dtype=torch.float64)
        return bool((rule or self.rule).lets_pass(p, torch.tensor([token])))

    def _more_pass_stricter(self, before: int, last: int, token: int) -> bool:
        """Whether a stricter rule, asked again of what was asked, lets pass what this one does not:
        then no threshold says how much of the quality is given up."""
        stricter = self.rule.stricter
        if stricter is None or not self.rule.pure:
            return False
        passes = self._passes(before, last, token, stricter)
        return passes and not self._passes(before, last, token)


def _misjudged(rule: SegmentRule, step: Step) -> str | None:
    """What of a span stands though its grade is not enough, or falls though it is."""
    words, grade = step.outcome.origin, step.extra.get("grade")
    stands = grade is not None and rule.accepts(grade)
    if "relaxed" in words and not stands:
        return f"{words.count('relaxed')} tokens are relaxed of a span of grade {grade}, for {rule}"
    if "recovered" in words and stands:
        return f"a token is rejected of a span of grade {grade}, for {rule}"
    return None


def _wrong_ledger(session: ObservedSession, taken: Sequence[Step]) -> str | None:
    """Return a message if a method's token accounting (`Segments.token_accounting`) is wrong.

    Compares it with itself, with the draws that the session saw, and with the tokens of the text.
    """
    counts = Counter[str]()
    for step in taken:
        counts.update(step.extra)
    if "target_generated" not in counts:
        return None
    for author, n in unsettled_tokens(counts).items():
        if n:
            return f"the {author} generated {n} tokens that were neither kept nor discarded"
    if counts["draft_generated"] != session.n_picked:
        return f"{counts['draft_generated']} tokens drafted by the ledger, {session.n_picked} drawn"
    origin = session.harness.text.origin
    drafted = origin.count("accepted") + origin.count("relaxed")
    if (counts["draft_kept"], counts["target_kept"]) != (drafted, len(origin) - drafted):
        kept = counts["draft_kept"], counts["target_kept"]
        return (
            f"the ledger keeps {kept} tokens where the text has {(drafted, len(origin) - drafted)}"
        )
    return None


def _tested(step: Step) -> list[int]:
    """The draft's tokens behind those that stand."""
    draft, path = step.draft, step.outcome.path
    if draft is None:
        return []
    parents = range(ROOT, draft.nodes - 1) if draft.parents is None else draft.parents
    last, ids = path[-1] if path else ROOT, draft.tokens.tolist()
    return [ids[node] for node, parent in enumerate(parents) if parent == last]


def _wrong_record(
    session: ObservedSession, taken: Sequence[Step], name: str, *, ruled: bool
) -> str | None:
    """What a run would refuse to write of the decoding."""
    ids = list(session.output())
    try:
        validate(_record(session, taken, ids, name, ruled=ruled))
    except ValueError as refused:
        return str(refused)
    if session.finish is None:
        return f"stopped after {len(ids)} tokens, with neither EOS nor the whole budget"
    return None


def _record(
    session: ObservedSession, taken: Sequence[Step], ids: list[int], name: str, *, ruled: bool
) -> Record:
    drafts = [step.draft for step in taken]
    return Record(
        prompt_id="table/0",
        cluster="table/0",
        task="table",
        family="other",
        category="other",
        turn=0,
        method=name,
        label=name,
        peer=False,
        params=Params(),
        sampling=session.sampling.rule,
        guarantee="exact_law",
        pass_=1,
        seed=session.sampling.seed,
        output_ids=ids,
        origin=list(session.harness.text.origin),
        n_tokens=len(ids),
        finish=session.finish or "length",
        steps=Steps(
            levels=[draft.levels if draft else 0 for draft in drafts],
            nodes=[draft.nodes if draft else 0 for draft in drafts],
            tested=[step.outcome.tested for step in taken],
            accepted=[step.outcome.origin.count("accepted") for step in taken],
            committed=[len(step.outcome.committed) for step in taken],
            relaxed=[step.outcome.origin.count("relaxed") for step in taken] if ruled else None,
        ),
        target_forwards=(trace := Trace.pack(session.harness.meter.forwards)).counted()[0],
        draft_forwards=trace.counted()[1],
        target_equivalents=sum(
            f.share for f in session.harness.meter.forwards if f.model == "target"
        ),
        forwards=trace,
        ns=Ns(total=0, prefill=0, decode=0, draft=0, verify=0, host=0),
        peak_bytes=None,
        other_cpu=None,
        verdict=Verdict("unchecked"),
        score=None,
        void=False,
        error=None,
    )

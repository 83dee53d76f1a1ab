"""Checks of model states, counters and timers after every step of a method."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace

import torch

from specbench_cli.audit.cases import RULES, Case, make_sampling, random_cases
from specbench_cli.audit.checks.tokens import long_case_for
from specbench_cli.audit.finding import Finding, Problem
from specbench_cli.audit.models.head import TableHead, find_wrong_features
from specbench_cli.audit.models.observed_session import ObservedSession
from specbench_cli.audit.models.table import find_wrong_rows, make_table_pair
from specbench_cli.audit.reference import Reference
from specbench_cli.audit.subject import AuditSubject, format_params, max_draft_levels
from specbench_cli.engine.method import Method
from specbench_cli.engine.params import MethodParams
from specbench_cli.engine.partial import Partial
from specbench_cli.engine.segments.rules import SegmentRule
from specbench_cli.engine.segments.token_accounting import unsettled_tokens
from specbench_cli.engine.types import Step
from specbench_cli.engine.verify.accept import AcceptRule
from specbench_cli.engine.verify.tree import ROOT
from specbench_cli.engine.watch import ReportedStep, find_misreport
from specbench_cli.store.invariants import validate
from specbench_cli.store.schema import Ns, Params, Record, Steps, Trace, Verdict

CASES = 12
"""Number of random tables for each parameter set and decoding rule."""

CASES_PER_CHANGE = 4
"""Number of random tables for the defaults with one parameter changed."""

MAX_LEVELS = 1_000
"""Maximum number of draft levels for which the budget of outputs is extended."""

DRAFTS_PER_OUTPUT = 4
"""Number of full drafts that fit in an output, for drafts that are near or equal to the target."""


STATES_HINT = (
    "`observe` must remove rejected tokens from the method's states (`state.rollback`; for a head,"
    " `levels.drop` removes all drafted rows). `propose` must process every pending token:"
    " `session.pending_tokens(state.length())`, or `session.pending_features` for a head. With a"
    " parallel drafter: check what the method sends to it after each step. Its states must contain"
    " rows of its `text` only"
)
"""Hint for a wrong state: code of the method to look at first."""
COUNTS_HINT = (
    "`Outcome` and `Draft`, if the method constructs them: path, origin and tested are counted from"
    " them. A step must report the whole draft that `session.score` got, and the outcome that"
    " `session.commit` returned. Tokens scored in addition need `session.score(..., proposed=)`. A"
    " draft has at most `limit` levels, and full acceptance adds a bonus token"
)
"""Hint for a wrong count."""
CLOCK_HINT = (
    "models that the method runs without the meter. `session.target`, `session.draft()`,"
    " `session.partial(...)` and `session.artifact(...)` are metered. A decoder without its"
    " wrapper, the `module` of a copy outside of `learn`, and threads of the method are not. A"
    " parallel drafter must be started with `session.start_worker`. A method must not use"
    " `session.harness`"
)
"""Hint for a wrong clock: a forward or a thread that the timer did not see."""
RULE_HINT = (
    "the accept rule, and the code that calls it. The lossless rule is applied first ('accepted')."
    " A token that it rejects is 'relaxed' if the accept rule accepts it under the target's"
    " distribution after the parent token. `session.verify` does this"
)
"""Hint for a wrong decision of an accept rule."""


def check_bookkeeping(subject: AuditSubject) -> list[Finding]:
    """Check states, counters and clock after every step of many outputs."""
    steps, rows = 0, 0
    state: Problem | None = None
    count: Problem | None = None
    clock: Problem | None = None
    for params, case in decoding_cases(subject):
        method = subject.method(params)
        session = case.open(**case.warm_up(method))
        steps_taken: list[Step] = []
        where = f"{format_params(params)}; {case}"
        rule_check = AcceptRuleCheck.create(method, case)
        worker_fault = None
        for step in method.generate(session):
            steps_taken.append(step)
            steps += 1
            worker_fault = worker_fault or session.watch.find_helpers()
            rows += sum(each.length() for _, each, _ in session.states())
            at = f"step {len(steps_taken)} of {where}"
            wrong = _find_state_error(session) or _find_drafter_error(session, step)
            state = Problem(wrong, at, STATES_HINT) if wrong else None
            wrong = _find_count_error(session, step, len(steps_taken), bonus=subject.method.bonus)
            count = Problem(wrong, at, COUNTS_HINT) if wrong else None
            if rule_check is not None and not count:
                wrong = rule_check.find_error(session, step)
                count = Problem(wrong, at, RULE_HINT) if wrong else None
            if state or count:
                break  # a wrong state can cause any later error
        else:
            wrong = _find_record_error(
                session, steps_taken, subject.name, ruled=rule_check is not None
            )
            wrong = wrong or _find_accounting_error(session, steps_taken)
            count = Problem(wrong, where, COUNTS_HINT) if wrong else None
        wrong = worker_fault or session.find_contradiction()
        clock = Problem(wrong, where, CLOCK_HINT) if wrong else None
        if state or count or clock:
            break
    return [
        Finding("states", state is None, {"rows": rows, "steps": steps}, state),
        Finding("counters", count is None, {"steps": steps}, count),
        Finding("clock", clock is None, {"steps": steps}, clock),
    ]


def decoding_cases(subject: AuditSubject) -> Iterator[tuple[MethodParams, Case]]:
    """Yield the cases to decode: all method parameters under every rule, with short and long
    outputs.
    """
    for rule in RULES:
        for params in subject.variants:
            levels = min(max_draft_levels(params, default=5), MAX_LEVELS)
            for case in random_cases(rule, CASES, levels):
                yield params, replace(case, eos=(2,), budget=max(case.budget, levels))
            for turn, kind in enumerate(("equal", "near")):
                sampling = make_sampling(rule, turn)
                yield (
                    params,
                    Case(
                        kind,
                        make_table_pair(kind, 5),
                        sampling,
                        budget=DRAFTS_PER_OUTPUT * levels + 1,
                    ),
                )
        for params in subject.variants[:2]:
            yield params, long_case_for(subject, rule)
        for params in subject.single_changes:
            levels = min(max_draft_levels(params, default=5), MAX_LEVELS)
            for case in random_cases(rule, CASES_PER_CHANGE, levels):
                yield params, replace(case, budget=max(case.budget, levels))


def _find_state_error(session: ObservedSession) -> str | None:
    """Return a description of a wrong model state, or None if all states are right.

    The target's state must contain all committed tokens except the last one. The states of other
    models
    must contain a prefix of these tokens. A head's state must be computed from the target's
    features.
    Entries that the head computed from its own features while drafting must be dropped.
    """
    text = session.tokens()[:-1]
    for decoder, state in session.model_states:
        part = decoder.attention_layers if isinstance(decoder, Partial) else None
        behind = decoder.name != "target"
        wrong = find_wrong_rows(state, text, decoder.first, layers=part, behind=behind)
        if wrong is None and isinstance(decoder, TableHead):
            wrong = find_wrong_features(state, text, decoder.target)
        if wrong is not None:
            return f"the {decoder.name}'s state: {wrong}"
    if session.state.length() != len(text):
        return f"the target's state: {session.state.length()} rows for {len(text)} committed tokens"
    return None


def _find_drafter_error(session: ObservedSession, step: Step) -> str | None:
    """Return a description of a wrong state of a parallel drafter, or None if it is right.

    The drafter's text must start with the tokens committed before the step. Its model states must
    contain the beginning of this text.
    """
    committed = session.tokens()[: len(session.tokens()) - len(step.outcome.committed)]
    for drafter in session.draft_sessions():
        if drafter.text[: len(committed)] != committed:
            return f"its drafter has the text {drafter.text}, but {committed} is committed"
        for decoder, state in drafter.states:
            wrong = find_wrong_rows(state, drafter.text, decoder.first, longer=True)
            if wrong is not None:
                return f"the state of its drafter's {decoder.name}: {wrong}"
    return None


def _find_count_error(
    session: ObservedSession, step: Step, steps: int, *, bonus: bool
) -> str | None:
    """Return a description of a wrong count in the step that was just committed, or None.

    Args:
        steps: number of steps, including this one.
        bonus: whether a bonus token follows a fully accepted draft.
    """
    outcome, draft, seen = step.outcome, step.draft, session.harness.step_records
    if len(seen) != steps:
        return f"drafts were scored for {len(seen)} steps so far"
    ends = session.finish is not None
    wrong = find_misreport(seen[-1], ReportedStep.from_step(step), bonus=bonus, last=ends)
    if wrong is not None:
        return wrong
    assert draft is not None
    n_accepted, levels, n = len(outcome.path), draft.levels, len(outcome.committed)
    limit = session.max_draft_length() + n + (not bonus)
    if levels > limit:
        return f"{levels} levels are drafted, but at most {max(limit, 0)} can be committed"
    if list(session.tokens()[-n:]) != list(outcome.committed):
        return f"{outcome.committed} reported, {session.tokens()[-n:]} in the text"
    expected = n_accepted + (bonus or n_accepted < levels or not levels)
    if not ends and n != expected:
        return (
            f"{n} tokens committed after {n_accepted} of {levels} accepted, instead of {expected}"
        )
    if not any(f.model == "target" and f.role != "draft" for f in step.forwards):
        return "the step has no forward of the target, except for drafting"
    return None


@dataclass(frozen=True)
class AcceptRuleCheck:
    """Check of an accept rule's decisions against the target's table.

    Attributes:
        rule: an accept rule that is not off.
        noise: keyed noise by output position.
        prompt_length: number of prompt tokens.
        draws: whether the lossless rule draws at random. Then the table does not fix the token.
    """

    rule: AcceptRule
    reference: Reference
    noise: Sequence[Sequence[float]]
    prompt_length: int
    draws: bool

    @classmethod
    def create(cls, method: Method, case: Case) -> AcceptRuleCheck | None:
        """Return the check of a method, or None if it has no accept rule."""
        if method.accept is None or method.accept.is_exact:
            return None
        reference = Reference(case.tables[0], case.sampling)
        noise = reference.noise(case.prompt_id, case.budget)
        return cls(method.accept, reference, noise, len(case.prompt), case.sampling.draws)

    def find_error(self, session: ObservedSession, step: Step) -> str | None:
        """Return a description of a committed token that the accept rule cannot explain, or
        None.
        """
        text = session.tokens()
        first = len(text) - len(step.outcome.committed)
        if (
            isinstance(self.rule, SegmentRule)
            and (wrong := _find_segment_error(self.rule, step)) is not None
        ):
            return wrong
        for at, origin in enumerate(step.outcome.origin, start=first):
            before, last, token = text[at - 2 : at + 1]
            where = f"after {before} {last}"
            if origin in ("accepted", "relaxed") and not self.draws:
                expected = self.reference.choose_token(
                    before, last, self.noise[at - self.prompt_length]
                )
                if (token == expected) != (origin == "accepted"):
                    return f"{token} {where} is {origin!r} but the target chooses {expected}"
            pure = self.rule.pure
            if origin == "relaxed" and pure and not self._passes(before, last, token):
                return f"{token} {where} is relaxed, but {self.rule} does not accept it"
            for each in _tested_tokens(step) if origin == "recovered" else ():
                if self._stricter_rule_accepts_more(before, last, each):
                    return (
                        f"{each} {where}: {self.rule.stricter} accepts it, but {self.rule} does"
                        " not, though it must accept every token that the stricter rule accepts"
                    )
                sure = self.rule.chance == 1 and pure
                if sure and self._passes(before, last, each):
                    return f"{each} {where} is rejected, but {self.rule} accepts it"
        return None

    def _passes(self, before: int, last: int, token: int, rule: AcceptRule | None = None) -> bool:
        """Return True if an accept rule accepts a token under the target's distribution.

        Args:
            rule: the accept rule; default: `self.rule`.
        """
        p = torch.tensor([self.reference.accept_rule_probs(before, last)], dtype=torch.float64)
        return bool((rule or self.rule).lets_pass(p, torch.tensor([token])))

    def _stricter_rule_accepts_more(self, before: int, last: int, token: int) -> bool:
        """Return True if a stricter threshold accepts a token that the threshold of this rule
        rejects.

        That is an error, because a stricter threshold must accept fewer tokens.
        """
        stricter = self.rule.stricter
        if stricter is None or not self.rule.pure:
            return False
        passes = self._passes(before, last, token, stricter)
        return passes and not self._passes(before, last, token)


def _find_segment_error(rule: SegmentRule, step: Step) -> str | None:
    """Return a description of a segment whose acceptance contradicts its grade, or None."""
    origins, grade = step.outcome.origin, step.extra.get("grade")
    is_accepted = grade is not None and rule.accepts(grade)
    if "relaxed" in origins and not is_accepted:
        n = origins.count("relaxed")
        return f"{n} tokens are relaxed in a segment of grade {grade}, for {rule}"
    if "recovered" in origins and is_accepted:
        return f"a token is rejected in a segment of grade {grade}, for {rule}"
    return None


def _find_accounting_error(session: ObservedSession, steps_taken: Sequence[Step]) -> str | None:
    """Return a message if a method's token accounting (`Segments.token_accounting`) is wrong.

    The counts must add up, and agree with the draws of the session and the tokens of the text.
    """
    counts = Counter[str]()
    for step in steps_taken:
        counts.update(step.extra)
    if "target_generated" not in counts:
        return None
    for author, n in unsettled_tokens(counts).items():
        if n:
            return f"the {author} generated {n} tokens that were neither kept nor discarded"
    if counts["draft_generated"] != session.n_picked:
        return (
            f"the token accounting has {counts['draft_generated']} drafted tokens, but"
            f" {session.n_picked} were drawn"
        )
    origin = session.harness.text.origin
    drafted = origin.count("accepted") + origin.count("relaxed")
    if (counts["draft_kept"], counts["target_kept"]) != (drafted, len(origin) - drafted):
        kept = counts["draft_kept"], counts["target_kept"]
        return (
            f"the token accounting has {kept} kept tokens of draft and target, but the text has"
            f" {(drafted, len(origin) - drafted)}"
        )
    return None


def _tested_tokens(step: Step) -> list[int]:
    """Return the draft tokens that verification tests after the last accepted one."""
    draft, path = step.draft, step.outcome.path
    if draft is None:
        return []
    parents = range(ROOT, draft.nodes - 1) if draft.parents is None else draft.parents
    last, ids = path[-1] if path else ROOT, draft.tokens.tolist()
    return [ids[node] for node, parent in enumerate(parents) if parent == last]


def _find_record_error(
    session: ObservedSession, steps_taken: Sequence[Step], name: str, *, ruled: bool
) -> str | None:
    """Return the reason why a run would reject the record of the output, or None."""
    ids = list(session.output())
    try:
        validate(_record(session, steps_taken, ids, name, ruled=ruled))
    except ValueError as refused:
        return str(refused)
    if session.finish is None:
        return f"stopped after {len(ids)} tokens, without an EOS and below the budget"
    return None


def _record(
    session: ObservedSession, steps_taken: Sequence[Step], ids: list[int], name: str, *, ruled: bool
) -> Record:
    drafts = [step.draft for step in steps_taken]
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
            tested=[step.outcome.tested for step in steps_taken],
            accepted=[step.outcome.origin.count("accepted") for step in steps_taken],
            committed=[len(step.outcome.committed) for step in steps_taken],
            relaxed=[step.outcome.origin.count("relaxed") for step in steps_taken]
            if ruled
            else None,
        ),
        target_forwards=(trace := Trace.pack(session.harness.meter.forwards)).count_forwards()[0],
        draft_forwards=trace.count_forwards()[1],
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

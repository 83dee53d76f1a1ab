"""One row of a table: a method's figures over a set of its cells."""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from itertools import chain
from typing import Any

import numpy as np

from specbench_cli.judge.broken import BASELINE, NearTies, surprise
from specbench_cli.stats.bootstrap import RareQuestions
from specbench_cli.stats.proof import upper_bound
from specbench_cli.store.schema import LOSSLESS, Record, Steps
from specbench_cli.summary.evidence import Evidence

TEXT = "text"
"""What a record counts (`extra`) where an output's ids are those of its text, tokenised here: the
engine that made it told none."""

_AUTHORS = ("draft", "target", "method")
LEDGER = (*(f"{who}_{fate}" for who in _AUTHORS for fate in ("kept", "discarded")), "scored")
"""What a record counts of who wrote its tokens, and what became of them."""
JUDGED, STOOD = "spans", "stood"
"""What a record counts of a rule over steps: those that it judged, and of them those that stood."""

_CONTROL = "random("
"""How the manifest writes the accept rule that lets pass at random."""
COMPARED = ("greedy", "coupled")
"""The decoding rules whose outputs are compared token by token; lossless rows that were not are
ranked with none."""
UNSCORED = "it is lossy, and of no two clusters the answers were scored"
"""Why a lossy row has no speedup."""
_LETTER = re.compile("[A-Za-z]'*")
_WORST_FIRST = ("mismatch", "failed", "near-tie", "unchecked", "identical", "reference")


@dataclass(frozen=True, slots=True)
class Speedup:
    """Speedup with its 95% interval.

    note: the reason if either is missing. rare: the rare questions that decide the speedup, if any.
    """

    ratio: float | None = None
    low: float | None = None
    high: float | None = None
    note: str | None = None
    rare: RareQuestions | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class Row:
    """All figures of a method; null where it has none (`-` in tables).

    params: as they took effect. params_from: "paper", "default", "tuned(n)" or "set"; null in runs
        that did not keep it.
    broken_why: what is wrong with a broken row.
    failed_why: Error of the first failed output; null if none failed.
    baseline: the label of the row that its speedups are over.
    text_compared: whether the ids of an output are those of its text, tokenised here.
    upper_bound: whether it read vanilla's output: a bound on others, ranked with none.
    letters, decode_letters: group letters among the rows it is ranked with, by speedup and by
        decode speedup.
    speedup*, decode_speedup*: see `summary`, with their 95% intervals; speedup_note says why the
        first or its interval is missing. rare_questions: number of rare questions that decide
        the first, 0 if there are none; speedup_without_rare: the speedup without them.
    mat: (n_tokens - 1) / steps, pooled (micro). mat_macro: mean over outputs. mat_full: without
        each output's last step, which the end of the output may cut. mat_note: why there is none.
        Of outputs whose steps another engine does not tell, but how many drafts it accepted,
        a step is each other token; the other figures of steps leave them out.
    acceptance_rate: accepted / drafted. alpha: accepted / tested. acceptance_by_position: accepted
        at level k / steps that drafted level k, from k = 1. nodes_per_step: drafted tokens a step,
        which trees have more of than levels. node_yield: accepted / nodes.
    accept_rule: what lets draft tokens stand that the lossless rule rejects, with its numbers; null
        where nothing does. relaxed: the share of tokens that stand so, none of which is among the
        accepted. rule_rate: of the levels that the lossless rule rejected, the share that passed;
        of a rule over steps, of those that it judged.
    draft_*, target_*, method_*: of a method that keeps a ledger, or an accept rule, tokens that
        each wrote, kept in the text or discarded; scored: what the target read to judge them, a
        question included. Null of other rows, of who writes nothing, and where single tokens are
        judged also of scored.
    control: whether it is there for lossy rows to be held against.
    state_scope: how long what it learns lives: "prompt", "run" or "corpus"; null in runs that did
        not keep it.
    devices: on how many of them its workers computed: the CPUs of a machine are one.
    tokens_per_joule: tokens / joules, over the outputs that have times; null where no counter told
        of all of them.
    synthetic: what of its models is made up; null where nothing is.
    reuse_rate: reused / (reused + missed), of methods that prepare drafts for outcomes that they
        guess and count so in `extra`.
    discard_rate: drafted tokens that do not stand / tokens. verification_rate: target forwards
        / tokens; of peers, whose forwards are not seen, one for prefill and one a step. work: the
        same with parts of the target counted too, each by the share of the weights that it reads;
        null for peers, and for records before schema 5.
    tokens_per_s: tokens / wall time. ttft_p50_ms: prefill. ms_per_token_*: decode time per token
        committed in it, over outputs. share_*: of decode; with several workers of their sum.
    learn_share: what learning between requests took of all wall time; null where nothing is learnt.
    identical to reference: outputs by verdict, each by its worst pass.
    questions_checked, questions_mismatched: those with a token verdict; those that failed it.
    mismatch_bound: what that proves: the rate of mismatches is at most this (95%).
    reference_read: of vanilla, how many outputs transformers' own module was asked about.
    near_tie_explained, near_tie_expected, near_tie_p: see `standing.NearTies`.
    likelihood_deviations, likelihood_chance: of drawn outputs, see `standing.surprise`.
    log_likelihood_*, length_*: see `evidence.Evidence`.
    complete, cut: under a grammar, outputs that came to its end, and those that the budget cut.
        valid: of the complete ones, those that belong to it. Null where there is no grammar.
    target_forwards, draft_forwards: all of them. peak_bytes: the largest. score: mean.
    score_difference*: its score less vanilla's on the same questions, n_scored of them, with the
        95% interval. A lossy row without it has no speedup.
    over_random*: its score less that of its random control, which lets as many pass, likewise.
    target_model, draft_model: their names; null where the run does not say, or the row has none.
    """

    label: str
    method: str
    peer: bool
    sampling: str
    guarantee: str
    lossless: bool
    params: dict[str, Any]
    params_from: str | None
    broken: bool
    broken_why: str | None
    baseline: str = BASELINE
    text_compared: bool = False
    upper_bound: bool = False
    control: bool = False
    failed_why: str | None = None
    state_scope: str | None = None
    synthetic: str | None = None
    tokens_per_joule: float | None = None
    devices: int = 1
    letters: str = ""
    decode_letters: str = ""
    rare_questions: int = 0
    speedup_without_rare: float | None = None
    speedup: float | None
    speedup_low: float | None
    speedup_high: float | None
    speedup_note: str | None
    decode_speedup: float | None
    decode_speedup_low: float | None
    decode_speedup_high: float | None
    mat: float | None
    mat_macro: float | None
    mat_full: float | None
    mat_note: str | None
    acceptance_rate: float | None
    alpha: float | None
    acceptance_by_position: tuple[float, ...]
    nodes_per_step: float | None
    node_yield: float | None
    accept_rule: str | None
    relaxed: float | None
    rule_rate: float | None
    draft_kept: int | None = None
    draft_discarded: int | None = None
    target_kept: int | None = None
    target_discarded: int | None = None
    method_kept: int | None = None
    method_discarded: int | None = None
    scored: int | None = None
    reuse_rate: float | None
    discard_rate: float | None
    verification_rate: float | None
    work: float | None
    tokens_per_s: float | None
    ttft_p50_ms: float | None
    ms_per_token_p50: float | None
    ms_per_token_p95: float | None
    share_target: float | None
    share_draft: float | None
    share_host: float | None
    learn_share: float | None = None
    identical: int
    near_tie: int
    mismatch: int
    unchecked: int
    failed: int
    reference: int
    questions_checked: int
    questions_mismatched: int
    mismatch_bound: float | None
    near_tie_explained: int
    near_tie_expected: float | None
    near_tie_p: float | None
    reference_read: int = 0
    likelihood_deviations: float | None = None
    likelihood_chance: float | None = None
    log_likelihood_difference: float | None
    log_likelihood_p: float | None
    length_difference: float | None
    length_p: float | None
    target_forwards: int | None
    draft_forwards: int | None
    peak_bytes: int | None
    complete: int | None = None
    cut: int | None = None
    valid: int | None = None
    score: float | None
    score_difference: float | None
    score_difference_low: float | None
    score_difference_high: float | None
    n_scored: int = 0
    over_random: float | None = None
    over_random_low: float | None = None
    over_random_high: float | None = None
    n_prompts: int
    n_outputs: int
    n_cells: int
    n_void: int
    target_model: str | None = None
    draft_model: str | None = None

    @property
    def per_forward(self) -> float | None:
        """Tokens a target forward; None where there is none, or they are not known."""
        return 1 / self.verification_rate if self.verification_rate else None

    @property
    def per_device(self) -> float | None:
        """The speedup for each device."""
        return None if self.speedup is None else self.speedup / self.devices

    @property
    def order_matters(self) -> bool:
        """Whether it learns from one prompt for the next."""
        return self.state_scope not in (None, "prompt")

    @property
    def engine(self) -> str:
        """The row that stands for its engine where that is not the run's own; else ""."""
        return "" if self.baseline == BASELINE else self.baseline


def alike(row: Row, ranked: Iterable[Row]) -> list[str]:
    """The labels of those rows that do not differ significantly from one of them."""
    own = set(groups(row.letters))
    return [
        other.label
        for other in ranked
        if other is not row and other.baseline == row.baseline and own & set(groups(other.letters))
    ]


AS_MANY = 0.05
"""How far a control's rate may be off."""


def as_many(control: Row, row: Row) -> bool:
    """Whether a control was to let about as many pass as a row's rule did."""
    rate = row.rule_rate
    return rate is None or abs(control.params.get("rate", 0.0) - rate) <= AS_MANY


def groups(letters: str) -> list[str]:
    """Letters one by one; after Z and z they go on with A'."""
    return _LETTER.findall(letters)


def make_row(
    cells: Sequence[Record],
    speedup: Speedup,
    decode_speedup: Speedup,
    *,
    broken_why: str | None,
    ties: NearTies,
    evidence: Evidence,
    bound: bool = False,
    accept: str | None = None,
    scope: str | None = None,
    baseline: str = BASELINE,
    control: bool = False,
    held: bool = False,
) -> Row:
    """The row of a label's cells (at least one); a broken one's speedups are withheld, and a lossy
    one's whose answers were not compared with vanilla's. accept: its accept rule, scope: how long
    its state lives, baseline: whose times its speedups are over, and control: whether others are
    held against it, as the manifest has them. held: whether outputs are held to a grammar."""
    first, broken = cells[0], broken_why is not None
    worst = _worst_verdicts(cells)
    verdicts = Counter(worst.values())
    unseen = first.guarantee in LOSSLESS and first.sampling in COMPARED and verdicts["unchecked"]
    if unseen:
        speedup = decode_speedup = Speedup(note=f"{unseen} outputs were compared with nothing")
    score = evidence.score
    if first.guarantee not in LOSSLESS and (score is None or score.low is None):
        speedup = decode_speedup = Speedup(note=UNSCORED)
    shown, decoding = (Speedup() if broken else s for s in (speedup, decode_speedup))
    likelihood, length = evidence.likelihood, evidence.length
    steps = [r.steps for r in cells if r.steps is not None]
    drafted, tested = _sum(s.levels for s in steps), _sum(s.tested for s in steps)
    accepted, nodes = _sum(s.accepted for s in steps), _sum(s.nodes for s in steps)
    lossy = [s for s in steps if s.relaxed is not None]
    relaxed = _sum(s.relaxed or [] for s in lossy)
    committed, counts = [sum(s.committed) for s in steps], [len(s.committed) for s in steps]
    ends = sum(s.committed[-1] for s in steps if s.committed)
    told = _told(cells)
    mat = _ratio(sum(committed) + told["committed"], sum(counts) + told["steps"])
    timed = [r for r in cells if not r.void and r.error is None]
    target, draft, host = _shares(timed)
    discarded, verified = _rates(cells)
    per_token = [
        r.ns.decode / (r.n_tokens - 1) / 1e6
        for r in timed
        if r.ns.decode is not None and r.n_tokens is not None and r.n_tokens > 1
    ]
    deviations, chance = surprise(cells) or (None, None)
    checked = {prompt for (prompt, _), v in worst.items() if v in ("identical", "near-tie")}
    mismatched = {prompt for (prompt, _), v in worst.items() if v == "mismatch"}
    return Row(
        label=first.label,
        method=first.method,
        peer=first.peer,
        sampling=first.sampling,
        guarantee=first.guarantee,
        lossless=first.guarantee in LOSSLESS,
        params=first.params.effective,
        params_from=first.params.source,
        broken=broken,
        broken_why=broken_why,
        baseline=baseline,
        text_compared=any(r.extra and TEXT in r.extra for r in cells),
        upper_bound=bound,
        control=control or (accept is not None and accept.startswith(_CONTROL)),
        state_scope=scope,
        synthetic=first.synthetic,
        tokens_per_joule=_per_joule(timed),
        speedup=shown.ratio,
        speedup_low=shown.low,
        speedup_high=shown.high,
        speedup_note=f"BROKEN: {broken_why}" if broken else speedup.note,
        rare_questions=shown.rare.count if shown.rare else 0,
        speedup_without_rare=shown.rare.speedup_without if shown.rare else None,
        decode_speedup=decoding.ratio,
        decode_speedup_low=decoding.low,
        decode_speedup_high=decoding.high,
        mat=mat,
        mat_macro=_mean([n / count for n, count in zip(committed, counts, strict=True) if n]),
        mat_full=_ratio(sum(committed) - ends, sum(counts) - sum(map(bool, counts))),
        mat_note=None if mat is not None else ("no step" if steps else "steps not reported"),
        acceptance_rate=_ratio(accepted + told["accepted"], drafted + told["drafted"]),
        alpha=_ratio(accepted, tested),
        acceptance_by_position=_by_position(cells),
        nodes_per_step=_ratio(nodes, sum(counts)),
        node_yield=_ratio(accepted, nodes),
        accept_rule=accept,
        relaxed=_ratio(relaxed, _sum(s.committed for s in lossy)),
        rule_rate=_rule_rate(cells, relaxed, lossy),
        **_ledger(cells),
        reuse_rate=_reuse_rate(cells),
        discard_rate=discarded,
        verification_rate=verified,
        work=_work(cells),
        tokens_per_s=_tokens_per_s(timed),
        ttft_p50_ms=_percentile(
            [r.ns.prefill / 1e6 for r in timed if r.ns.prefill is not None], 50
        ),
        ms_per_token_p50=_percentile(per_token, 50),
        ms_per_token_p95=_percentile(per_token, 95),
        share_target=target,
        share_draft=draft,
        share_host=host,
        learn_share=_learn_share(timed),
        identical=verdicts["identical"],
        near_tie=verdicts["near-tie"],
        mismatch=verdicts["mismatch"],
        unchecked=verdicts["unchecked"],
        failed=verdicts["failed"],
        failed_why=next((r.error for r in cells if r.error is not None), None),
        reference=verdicts["reference"],
        questions_checked=len(checked | mismatched),
        questions_mismatched=len(mismatched),
        mismatch_bound=upper_bound(len(mismatched), len(checked | mismatched))
        if checked | mismatched
        else None,
        near_tie_explained=ties.explained,
        near_tie_expected=ties.expected,
        near_tie_p=ties.p,
        reference_read=len({(r.prompt_id, r.turn) for r in cells if _is_read(r)}),
        likelihood_deviations=deviations,
        likelihood_chance=chance,
        log_likelihood_difference=likelihood.difference if likelihood else None,
        log_likelihood_p=likelihood.p if likelihood else None,
        length_difference=length.difference if length else None,
        length_p=length.p if length else None,
        target_forwards=_total(r.target_forwards for r in cells),
        draft_forwards=_total(r.draft_forwards for r in cells),
        peak_bytes=max((r.peak_bytes for r in cells if r.peak_bytes is not None), default=None),
        complete=sum(r.finish == "eos" for r in cells) if held else None,
        cut=sum(r.finish == "length" for r in cells) if held else None,
        valid=sum(r.valid is True for r in cells) if held else None,
        score=_mean([r.score for r in cells if r.score is not None]),
        score_difference=score.mean if score else None,
        score_difference_low=score.low if score else None,
        score_difference_high=score.high if score else None,
        n_scored=evidence.scored,
        n_prompts=len({r.prompt_id for r in cells}),
        n_outputs=len(worst),
        n_cells=len(cells),
        n_void=sum(r.void for r in cells),
    )


def _is_read(record: Record) -> bool:
    """Whether it is vanilla's, and transformers' own module was asked about it."""
    verdict = record.verdict
    return verdict is not None and verdict.kind == "reference" and verdict.gap is not None


def _worst_verdicts(cells: Iterable[Record]) -> dict[tuple[str, int], str]:
    """Each output's worst verdict over the passes; "failed" where it has none."""
    worst: dict[tuple[str, int], str] = {}
    for r in cells:
        kind = r.verdict.kind if r.verdict is not None and r.error is None else "failed"
        at = r.prompt_id, r.turn
        worst[at] = min(kind, worst.get(at, kind), key=_WORST_FIRST.index)
    return worst


def _told(cells: Iterable[Record]) -> Counter[str]:
    """What another engine counted of outputs whose steps it does not tell. Every step of any engine
    adds one token of the target's own to the accepted ones."""
    told = Counter[str]()
    for r in cells:
        if r.steps is None and r.n_tokens and r.extra and {"drafted", "accepted"} <= r.extra.keys():
            committed, accepted = r.n_tokens - 1, int(r.extra["accepted"])
            told.update(
                committed=committed,
                steps=max(bool(committed), committed - accepted),
                drafted=int(r.extra["drafted"]),
                accepted=accepted,
            )
    return told


def _reuse_rate(cells: Iterable[Record]) -> float | None:
    counted = Counter[str]()
    for r in cells:
        if r.extra:
            counted.update(r.extra)
    return _ratio(counted["reused"], counted["reused"] + counted["missed"])


def _by_position(cells: Iterable[Record]) -> tuple[float, ...]:
    # Between relaxed levels the accepted ones are not the first: the tokens say which they are.
    known = [
        (r.steps, r.origin if any(r.steps.relaxed or ()) else None)
        for r in cells
        if r.steps is not None
    ]
    drafted = _reaching(chain.from_iterable(steps.levels for steps, _ in known))
    first = chain.from_iterable(steps.accepted for steps, origin in known if origin is None)
    accepted = Counter(_reaching(first))
    for steps, origin in known:
        if origin is not None:
            accepted.update(_accepted_levels(steps, origin))
    return tuple(accepted[level] / n for level, n in drafted.items())


def _reaching(depths: Iterable[int]) -> dict[int, int]:
    """How many of some depths reach each level, from 1 to the deepest."""
    counts, found, n = Counter(depths), dict[int, int](), 0
    for level in range(max(counts, default=0), 0, -1):
        n += counts[level]
        found[level] = n
    return dict(sorted(found.items()))


def _accepted_levels(steps: Steps, origin: Sequence[str]) -> Iterable[int]:
    """The accepted levels of all steps, as their tokens say."""
    at = 1  # prefill commits the first token
    for committed in steps.committed:
        for level, word in enumerate(origin[at : at + committed], start=1):
            if word == "accepted":
                yield level
        at += committed


def _ledger(cells: Sequence[Record]) -> dict[str, Any]:
    """Tokens by who wrote them and what became of them: as the method counts them, or where an
    accept rule is on as the steps say."""
    told = [r.extra for r in cells if r.extra and r.extra.keys() >= {"target_kept"}]
    if told:
        totals = {name: int(sum(each.get(name, 0) for each in told)) for name in LEDGER}
        return {k: n for k, n in totals.items() if n or not k.startswith("method")}
    known = [(r.steps, r.n_tokens or 0) for r in cells if r.steps is not None]
    known = [(steps, n) for steps, n in known if steps.relaxed is not None]
    if not known:
        return {}
    stood = sum(sum(steps.accepted) + sum(steps.relaxed or ()) for steps, _ in known)
    return {
        "draft_kept": stood,
        "draft_discarded": sum(sum(steps.nodes) for steps, _ in known) - stood,
        "target_kept": sum(n for _, n in known) - stood,
    }


def _rule_rate(cells: Sequence[Record], relaxed: int, lossy: Sequence[Steps]) -> float | None:
    """Of what a lossy rule was asked about, the share that passed."""
    judged, stood = (sum((r.extra or {}).get(name, 0) for r in cells) for name in (JUDGED, STOOD))
    if judged:
        return stood / judged
    return _ratio(relaxed, _sum(s.tested for s in lossy) - _sum(s.accepted for s in lossy))


def _shares(timed: Iterable[Record]) -> tuple[float | None, float | None, float | None]:
    """Verify, draft and host time over their sum."""
    spent = np.zeros(3)
    for r in timed:
        if r.ns.verify is not None and r.ns.draft is not None and r.ns.host is not None:
            spent += r.ns.verify, r.ns.draft, r.ns.host
    if not spent.sum():
        return None, None, None
    target, draft, host = (spent / spent.sum()).tolist()
    return target, draft, host


def _learn_share(timed: Iterable[Record]) -> float | None:
    """Of the wall time of the outputs that learning could delay."""
    spans = [(r.ns.learn, r.ns.total) for r in timed if r.ns.learn is not None and r.ns.total]
    return _ratio(sum(learn for learn, _ in spans), sum(total for _, total in spans))


def _rates(cells: Iterable[Record]) -> tuple[float | None, float | None]:
    """Discard rate and verification rate, over the outputs whose steps are known."""
    discarded = verified = tokens = 0
    for r in cells:
        if r.steps is not None and r.n_tokens:
            stand = sum(r.steps.accepted) + sum(r.steps.relaxed or ())
            discarded += sum(r.steps.nodes) - stand
            verified += 1 + len(r.steps.levels) if r.target_forwards is None else r.target_forwards
            tokens += r.n_tokens
    return _ratio(discarded, tokens), _ratio(verified, tokens)


def _work(cells: Iterable[Record]) -> float | None:
    known = [
        (r.target_equivalents, r.n_tokens)
        for r in cells
        if r.target_equivalents is not None and r.n_tokens
    ]
    return _ratio(sum(work for work, _ in known), sum(n for _, n in known))


def _tokens_per_s(timed: Iterable[Record]) -> float | None:
    spans = [(r.n_tokens, r.ns.total) for r in timed if r.n_tokens and r.ns.total]
    return _ratio(1e9 * sum(n for n, _ in spans), sum(ns for _, ns in spans))


def _sum(lists: Iterable[list[int]]) -> int:
    return sum(map(sum, lists))


def _total(counts: Iterable[int | None]) -> int | None:
    """The sum, null if no cell knows its count."""
    known = [n for n in counts if n is not None]
    return sum(known) if known else None


def _ratio(a: float, b: float) -> float | None:
    return a / b if b else None


def _mean(values: Sequence[float]) -> float | None:
    return sum(values) / len(values) if values else None


def _percentile(values: Sequence[float], q: float) -> float | None:
    return float(np.percentile(values, q)) if values else None


def _per_joule(timed: Sequence[Record]) -> float | None:
    """Tokens for a joule, where all outputs have their energy."""
    joules = [record.energy_j for record in timed]
    known = [each for each in joules if each is not None]
    whole = len(known) == len(joules) and sum(known) > 0
    return sum(record.n_tokens or 0 for record in timed) / sum(known) if whole else None

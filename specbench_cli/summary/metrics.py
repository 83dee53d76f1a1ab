"""Metrics of a method, each declared once: name, heading, unit, meaning, function and format.

A metric is a field of `MethodSummary`. The field's name is its key in `summary.csv`, JSON and
pandas. The columns of all tables and docs/reference/metrics.md are made from these declarations. To
add a metric, add a field here, and add its name to one of the tables at the end of this file.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import MISSING, dataclass, field, fields, replace
from functools import partial
from itertools import groupby
from operator import attrgetter
from typing import Any

from specbench_cli.config.sweep import format_params
from specbench_cli.stats.failure_rate import upper_bound
from specbench_cli.store.schema import BASELINE
from specbench_cli.summary.columns import Align, Column, Value
from specbench_cli.summary.formats import (
    NONE,
    bounds,
    number,
    percent,
    points,
    ratio,
    text_or_none,
)
from specbench_cli.summary.outputs import TEXT, MethodOutputs, known_sum, mean, percentile, total
from specbench_cli.summary.outputs import ratio as quotient


@dataclass(frozen=True, slots=True, eq=False)
class Metric:
    """Declaration of a metric.

    Attributes:
        compute: Computes the metric from the outputs of a method. None if it depends on all
            methods.
        meaning: Explanation in a few words.
        unit: Unit. "" for shares, counts and texts.
        heading: Heading of the metric's column. "" if no table has such a column.
        form: Formats the value as the text of a cell.
        cell: Formats the text of a cell from all metrics of a method. If it is set, `form` is not
            used.
        tsv: Name in `--format tsv`. "" uses the field's name.
        align, choose: See `Heading`.
        plain: True if the heading needs no explanation.
        when: See `Column`.
        optional: True to omit the column if no method has a value.
        look: See `Cell`.
    """

    compute: Callable[[MethodOutputs], Any] | None
    meaning: str
    unit: str = ""
    heading: str = ""
    form: Callable[[Any], str] = number
    cell: Callable[[MethodSummary], str] | None = None
    tsv: str = ""
    align: Align = "r"
    choose: bool = False
    plain: bool = False
    when: Callable[[Sequence[MethodSummary]], bool] = lambda _: True
    optional: bool = False
    look: Callable[[MethodSummary], str] = lambda _: ""

    def column(self, name: str) -> Column[MethodSummary]:
        """Return the column of this metric.

        Args:
            name: Name of the field of `MethodSummary`.
        """
        get = attrgetter(name)
        return Column(
            self.heading,
            "" if self.plain else self.meaning,
            self.align,
            self.choose,
            format=self.cell or (lambda row: self.form(get(row))),
            data={self.tsv or name: get},
            when=any_has(name) if self.optional else self.when,
            look=self.look,
        )


def metric(
    of: Callable[[MethodOutputs], Any] | None, meaning: str, *, default: Any = MISSING, **more: Any
) -> Any:
    """Declare a metric as a field of `MethodSummary`.

    Args:
        of: Computes the metric (`Metric.compute`).
        meaning: Explanation in a few words.
        default: Value of the field before it is set by `replace`.
        more: Further attributes of `Metric`.
    """
    return field(default=default, metadata={"metric": Metric(of, meaning, **more)})


def any_has(name: str) -> Callable[[Sequence[MethodSummary]], bool]:
    """Return a function that checks if any method has a value of a metric."""
    return lambda rows: any(getattr(row, name) is not None for row in rows)


# ---- cells ---------------------------------------------------------------------------------------

_whole, _tenths, _thousandths = (partial(number, digits=n) for n in (0, 1, 3))

WORK = "target forwards per token; a partial forward counts by its share of the weights"
REPLAY = "replay"
"""Decoding rule that feeds vanilla's tokens to every method (`--verify replay`)."""
_ROUNDING = 1e-6
"""Maximum rounding error of shares that are stored in records."""
_MAX_SINGLE_LETTERS = 3
_LETTER = re.compile("[A-Za-z]'*")


def speedup_or_broken(row: MethodSummary) -> str:
    """Format the speedup of a method, or return "BROKEN" if its output is wrong."""
    return "BROKEN" if row.broken else ratio(row.speedup)


def interval(row: MethodSummary) -> str:
    """Format the 95% interval of a method's speedup."""
    return bounds(row.speedup_low, row.speedup_high)


def letters_of(row: MethodSummary) -> list[str]:
    """Return the letters of a method's significance groups.

    If the letters from A to Z and a to z are used up, A', B' and so on follow.
    """
    return _LETTER.findall(row.letters)


def group(row: MethodSummary) -> str:
    """Format the letters of a method's significance groups. Four or more in a row become A-D."""
    found = list(enumerate(letters_of(row)))
    parts = []
    for _, run in groupby(found, lambda at: (ord(at[1][0]) - at[0], at[1][1:])):
        letters = [letter for _, letter in run]
        parts += [f"{letters[0]}-{letters[-1]}"] if len(letters) > _MAX_SINGLE_LETTERS else letters
    return "".join(parts)


def verdicts(row: MethodSummary) -> str:
    """Format the number of outputs by verdict, such as "2 mismatch, 46 identical"."""
    counts = {
        "mismatch": row.mismatch,
        "failed": row.failed,
        "identical": row.identical,
        "near-tie": row.near_tie,
        "replayed" if row.sampling == REPLAY else "unchecked": row.unchecked,
    }
    special = ["upper bound"] * row.upper_bound + ["control"] * row.control
    counted = [f"{n} {kind}" for kind, n in counts.items() if n]
    return ", ".join(special + counted + ["reference"] * bool(row.reference))


def accuracy_loss(row: MethodSummary) -> str:
    """Format a lossy method's accuracy minus vanilla's, in percentage points with its interval."""
    if row.lossless:
        return NONE
    return points(row.score_difference, row.score_difference_low, row.score_difference_high)


def accuracy_note(row: MethodSummary) -> str:
    """Return the accuracy loss as a phrase after a speedup, or "" for a lossless method."""
    return "" if accuracy_loss(row) == NONE else f"at {accuracy_loss(row)} points, n {row.n_scored}"


def has_partial(rows: Iterable[MethodSummary]) -> bool:
    """Return True if a method's target forwards may run only a part of the target.

    Such forwards do not all cost the same.
    """
    return any(
        row.work is not None
        and row.verification_rate is not None
        and abs(row.work - row.verification_rate) > _ROUNDING
        for row in rows
    )


def _kind(row: MethodSummary) -> str:
    special = "upper bound" if row.upper_bound else "control" if row.control else "ours"
    return "peer" if row.peer else special


def _shares(row: MethodSummary) -> tuple[float, ...]:
    """Return the shares of target, draft and host in decode time, or () if one is unknown."""
    shares = (row.share_target, row.share_draft, row.share_host)
    known = tuple(share for share in shares if share is not None)
    return known if len(known) == len(shares) else ()


def _time(row: MethodSummary) -> str:
    named = zip(("target", "draft", "host"), _shares(row), strict=False)
    return ", ".join(f"{name} {share:.0%}" for name, share in named) or NONE


def _positions(row: MethodSummary) -> str:
    return ", ".join(map(percent, row.acceptance_by_position[:8])) or NONE


def _macro(row: MethodSummary) -> str:
    return number(row.mat_macro) + (f" ({row.mat_note})" if row.mat_note else "")


def _lossy(rows: Sequence[MethodSummary]) -> bool:
    return not all(row.lossless for row in rows)


def _differs_in(name: str, *but: object) -> Callable[[Sequence[MethodSummary]], bool]:
    """Return a function that checks if methods differ in a metric.

    Args:
        but: Values of the metric that are ignored.
    """
    return lambda rows: len({getattr(row, name) for row in rows} - {*but}) > 1


def _accounting_metric(key: str, meaning: str, heading: str = "") -> Any:
    """Declare a metric of the token accounting, which counts tokens by their author and use."""
    return metric(
        lambda o: o.token_accounting.get(key),
        meaning,
        unit="tokens",
        heading=heading,
        form=_whole,
        optional=True,
    )


# ---- the metrics ---------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True, kw_only=True)
class MethodSummary:
    """All metrics of a method, over all its outputs or those of one task family.

    Missing values are None.
    """

    label: str = metric(
        lambda o: o.first.label,
        "name in tables",
        heading="method",
        form=str,
        tsv="method",
        align="l",
        plain=True,
        look=lambda row: "peer" if row.peer else "bound" if row.upper_bound else "",
    )
    method: str = metric(lambda o: o.first.method, "method")
    peer: bool = metric(
        lambda o: o.first.peer, "whether it is another implementation, such as hf:assisted"
    )
    sampling: str = metric(
        lambda o: o.first.sampling, "decoding rule: greedy, rejection sampling, ..."
    )
    guarantee: str = metric(
        lambda o: o.first.guarantee,
        "what the method guarantees about its output",
        heading="guarantee",
        form=lambda value: value.replace("_", " "),
        align="l",
        choose=True,
        plain=True,
    )
    lossless: bool = metric(lambda o: o.lossless, "whether that guarantee is lossless")
    params: Mapping[str, Any] = metric(
        lambda o: o.first.params.effective, "parameters that were used"
    )
    params_from: str | None = metric(
        lambda o: o.first.params.source,
        "source of the parameters",
        heading="from",
        form=text_or_none,
        align="l",
    )
    broken: bool = metric(
        lambda o: o.broken_why is not None,
        "whether its outputs are wrong, so that it has no speedup",
    )
    broken_why: str | None = metric(
        lambda o: o.broken_why,
        "what is wrong",
        heading="what is wrong",
        form=text_or_none,
        align="l",
        plain=True,
    )
    baseline: str = metric(lambda o: o.baseline, "label of the method that speedups are over")
    text_compared: bool = metric(
        lambda o: any(r.extra and TEXT in r.extra for r in o.records),
        "whether its engine reports no token ids, so that specbench tokenized its text",
    )
    upper_bound: bool = metric(
        lambda o: o.upper_bound,
        "whether it used vanilla's output, as an upper bound for other methods; not ranked",
    )
    control: bool = metric(lambda o: o.control, "whether it is a control for lossy methods")
    failed_why: str | None = metric(
        lambda o: next((r.error for r in o.records if r.error is not None), None),
        "error of the first failed output",
    )
    state_scope: str | None = metric(
        lambda o: o.state_scope,
        "lifetime of what it learns: prompt, run or corpus",
        heading="state",
        form=text_or_none,
        align="l",
        plain=True,
    )
    synthetic: str | None = metric(
        lambda o: o.first.synthetic,
        "synthetic if weights are random, so that its results are not those of a model",
        heading="models",
        form=lambda value: "synthetic" if value else "real",
        align="l",
        optional=True,
    )
    tokens_per_joule: float | None = metric(
        lambda o: o.tokens_per_joule(),
        "tokens / joules of the whole machine, from its counters (RAPL, NVML)",
        unit="tokens/J",
        heading="tok/J",
        optional=True,
    )
    devices: int = metric(None, "number of devices that its workers used", default=1)
    letters: str = metric(
        None,
        "methods that share a letter do not differ significantly; letters compare all pairs at"
        " once",
        heading="group",
        cell=group,
        tsv="group",
        align="l",
        look=lambda _: "letters",
        default="",
    )
    decode_letters: str = metric(None, "the same for the decode speedup", default="")
    rare_questions: int = metric(
        lambda o: rare.count if (rare := o.unless_withheld(o.wall).rare) else 0,
        "number of outlier questions that decide the speedup",
    )
    speedup_without_rare: float | None = metric(
        lambda o: rare.speedup_without if (rare := o.unless_withheld(o.wall).rare) else None,
        "speedup without the outlier questions",
        unit="x",
    )
    speedup: float | None = metric(
        lambda o: o.unless_withheld(o.wall).ratio,
        "vanilla's time / the method's, paired on prompts",
        unit="x",
        heading="speedup",
        cell=speedup_or_broken,
        look=lambda row: "broken" if row.broken else "strong",
    )
    speedup_low: float | None = metric(
        lambda o: o.unless_withheld(o.wall).low, "lower end of its 95% interval", unit="x"
    )
    speedup_high: float | None = metric(
        lambda o: o.unless_withheld(o.wall).high, "upper end of its 95% interval", unit="x"
    )
    speedup_note: str | None = metric(
        lambda o: o.unless_withheld(o.wall).note, "why the speedup or its interval is missing"
    )
    decode_speedup: float | None = metric(
        lambda o: o.unless_withheld(o.decoding).ratio,
        "speedup of decode time, without prefill",
        unit="x",
        heading="decode",
        form=ratio,
    )
    decode_speedup_low: float | None = metric(
        lambda o: o.unless_withheld(o.decoding).low, "lower end of its 95% interval", unit="x"
    )
    decode_speedup_high: float | None = metric(
        lambda o: o.unless_withheld(o.decoding).high, "upper end of its 95% interval", unit="x"
    )
    mat: float | None = metric(
        MethodOutputs.mat,
        "mean accepted tokens: committed tokens per step",
        unit="tokens/step",
        heading="MAT",
    )
    mat_macro: float | None = metric(
        MethodOutputs.mat_macro,
        "MAT as a mean over outputs",
        unit="tokens/step",
        heading="MAT, macro",
        cell=_macro,
    )
    mat_full: float | None = metric(
        MethodOutputs.mat_full,
        "MAT without the last step of each output, which may be cut",
        unit="tokens/step",
        heading="MAT, full steps",
    )
    mat_note: str | None = metric(
        lambda o: None if o.mat() is not None else "no step" if o.steps else "steps not reported",
        "why MAT is missing",
    )
    acceptance_rate: float | None = metric(
        lambda o: quotient(o.accepted + o.reported["accepted"], o.levels + o.reported["drafted"]),
        "accepted levels / drafted levels",
        heading="accepted",
        form=percent,
        tsv="accept",
    )
    alpha: float | None = metric(
        lambda o: quotient(o.accepted, o.tested_levels),
        "accepted levels / tested levels",
        heading="alpha",
        form=percent,
    )
    acceptance_by_position: tuple[float, ...] = metric(
        MethodOutputs.acceptance_by_position, "acceptance of each draft level: accepted / drafted"
    )
    nodes_per_step: float | None = metric(
        lambda o: quotient(o.nodes, sum(o.counts)),
        "drafted tokens per step",
        unit="tokens/step",
        heading="nodes/step",
        form=_tenths,
    )
    node_yield: float | None = metric(
        lambda o: quotient(o.accepted, o.nodes),
        "accepted levels / drafted tokens",
        heading="node yield",
        form=percent,
    )
    accept_rule: str | None = metric(
        lambda o: o.accept_rule,
        "lossy accept rule with its parameters",
        heading="accept rule",
        form=text_or_none,
        align="l",
        plain=True,
        optional=True,
    )
    relaxed: float | None = metric(
        lambda o: quotient(o.relaxed, total(s.committed for s in o.relaxing)),
        "share of the tokens that only a lossy accept rule accepted",
        heading="relaxed",
        form=percent,
        optional=True,
    )
    rule_rate: float | None = metric(
        MethodOutputs.rule_rate,
        "share of the rejected levels, or of the judged steps, that the lossy accept rule accepted",
        heading="rule rate",
        form=percent,
        optional=True,
    )
    draft_kept: int | None = _accounting_metric(
        "draft_kept", "tokens from the draft that are in the outputs", heading="draft kept"
    )
    draft_discarded: int | None = _accounting_metric(
        "draft_discarded", "tokens from the draft that were discarded", heading="draft discarded"
    )
    target_kept: int | None = _accounting_metric(
        "target_kept", "tokens from the target that are in the outputs", heading="target kept"
    )
    target_discarded: int | None = _accounting_metric(
        "target_discarded", "tokens from the target that were discarded", heading="target discarded"
    )
    method_kept: int | None = _accounting_metric(
        "method_kept", "tokens that the method itself inserted", heading="method's own"
    )
    method_discarded: int | None = metric(
        lambda o: o.token_accounting.get("method_discarded"),
        "inserted tokens that were discarded",
        unit="tokens",
    )
    scored: int | None = _accounting_metric(
        "scored", "tokens that the target read only to judge them", heading="scored"
    )
    reuse_rate: float | None = metric(
        MethodOutputs.reuse_rate,
        "share of the drafts prepared in advance that were used",
        heading="reused",
        form=percent,
    )
    discard_rate: float | None = metric(
        lambda o: o.rates[0], "rejected draft tokens / generated tokens", heading="discarded"
    )
    verification_rate: float | None = metric(
        lambda o: o.rates[1], "target forwards / generated tokens", heading="verified"
    )
    work: float | None = metric(
        MethodOutputs.work, WORK, unit="forwards/token", heading="work", when=has_partial
    )
    tokens_per_s: float | None = metric(
        MethodOutputs.tokens_per_s,
        "generated tokens / wall time",
        unit="tokens/s",
        heading="tok/s",
        form=_whole,
    )
    ttft_p50_ms: float | None = metric(
        MethodOutputs.ttft_ms,
        "time to the first token, median",
        unit="ms",
        heading="TTFT p50 ms",
        form=_tenths,
    )
    ms_per_token_p50: float | None = metric(
        lambda o: percentile(o.ms_per_token, 50),
        "decode time per token, median over outputs",
        unit="ms",
        heading="ms/token p50",
    )
    ms_per_token_p95: float | None = metric(
        lambda o: percentile(o.ms_per_token, 95),
        "decode time per token, 95th percentile over outputs",
        unit="ms",
        heading="p95",
    )
    share_target: float | None = metric(lambda o: o.shares[0], "target's share of decode time")
    share_draft: float | None = metric(lambda o: o.shares[1], "draft's share of decode time")
    share_host: float | None = metric(lambda o: o.shares[2], "host's share of decode time")
    learn_share: float | None = metric(
        MethodOutputs.learn_share, "share of wall time spent on learning between requests"
    )
    identical: int = metric(lambda o: o.verdicts["identical"], "outputs identical to vanilla's")
    near_tie: int = metric(
        lambda o: o.verdicts["near-tie"],
        "outputs that differ only within the target's rounding error",
        heading="near-ties",
        form=_whole,
        plain=True,
    )
    mismatch: int = metric(
        lambda o: o.verdicts["mismatch"], "outputs that differ from vanilla's beyond rounding"
    )
    unchecked: int = metric(
        lambda o: o.verdicts["unchecked"], "outputs that were not compared with vanilla's"
    )
    failed: int = metric(lambda o: o.verdicts["failed"], "outputs that failed")
    reference: int = metric(
        lambda o: o.verdicts["reference"], "outputs that other methods are compared with"
    )
    questions_checked: int = metric(
        lambda o: len(o.checked_questions),
        "questions whose outputs were compared token by token",
        heading="questions checked",
        form=_whole,
        plain=True,
    )
    questions_mismatched: int = metric(
        lambda o: len(o.mismatched_questions),
        "questions with a mismatch",
        heading="mismatched",
        form=_whole,
        plain=True,
    )
    mismatch_bound: float | None = metric(
        lambda o: (
            upper_bound(len(o.mismatched_questions), len(o.checked_questions))
            if o.checked_questions
            else None
        ),
        "upper bound of the mismatch rate",
        heading="at most (95%)",
        form=partial(percent, digits=2),
    )
    near_tie_explained: int = metric(
        lambda o: o.ties.explained,
        "near-ties that vanilla has, too, if its forward is as wide as verification",
        heading="explained by width",
        form=_whole,
    )
    near_tie_expected: float | None = metric(
        lambda o: o.ties.expected,
        "number of near-ties that rounding can cause",
        heading="expected at most",
    )
    near_tie_p: float | None = metric(
        lambda o: o.ties.p,
        "probability that rounding causes so many near-ties",
        heading="p",
        form=_thousandths,
    )
    reference_read: int = metric(
        MethodOutputs.reference_read,
        "vanilla's outputs that were compared with transformers' own module",
    )
    likelihood_deviations: float | None = metric(
        lambda o: o.deviation[0],
        "deviation of sampled outputs from the target's distribution, in standard deviations",
    )
    likelihood_chance: float | None = metric(
        lambda o: o.deviation[1], "probability of at least this deviation"
    )
    log_likelihood_difference: float | None = metric(
        lambda o: one.difference if (one := o.evidence.likelihood) else None,
        "log-likelihood per token minus vanilla's",
        unit="nats",
        heading="log-likelihood/token",
        form=partial(number, digits=4),
        plain=True,
    )
    log_likelihood_p: float | None = metric(
        lambda o: one.p if (one := o.evidence.likelihood) else None,
        "p-value of that difference",
        heading="p-value",
        form=_thousandths,
        plain=True,
    )
    length_difference: float | None = metric(
        lambda o: one.difference if (one := o.evidence.length) else None,
        "output length minus vanilla's",
        unit="tokens",
        heading="length",
        form=_tenths,
        plain=True,
    )
    length_p: float | None = metric(
        lambda o: one.p if (one := o.evidence.length) else None,
        "p-value of the length difference",
        heading="p-value of the length",
        form=_thousandths,
        plain=True,
    )
    target_forwards: int | None = metric(
        lambda o: known_sum(r.target_forwards for r in o.records),
        "number of target forwards",
        heading="target forwards",
        form=_whole,
        plain=True,
    )
    draft_forwards: int | None = metric(
        lambda o: known_sum(r.draft_forwards for r in o.records),
        "number of draft forwards",
        heading="draft forwards",
        form=_whole,
        plain=True,
    )
    peak_bytes: int | None = metric(
        lambda o: max((r.peak_bytes for r in o.records if r.peak_bytes is not None), default=None),
        "peak memory, maximum over outputs",
        unit="bytes",
        heading="peak MB",
        form=lambda value: _whole(None if value is None else value / 1e6),
    )
    complete: int | None = metric(
        lambda o: o.count_finished("eos"), "outputs that the grammar accepts as complete"
    )
    cut: int | None = metric(
        lambda o: o.count_finished("length"), "outputs cut at the maximum number of tokens"
    )
    valid: int | None = metric(
        lambda o: sum(r.valid is True for r in o.records) if o.constrained else None,
        "complete outputs that match the grammar",
    )
    score: float | None = metric(
        lambda o: mean([r.score for r in o.records if r.score is not None]),
        "mean score of the answers",
        heading="accuracy",
        form=percent,
        tsv="accuracy",
        optional=True,
    )
    score_difference: float | None = metric(
        lambda o: one.mean if (one := o.evidence.score) else None,
        "mean score minus vanilla's on the same questions",
    )
    score_difference_low: float | None = metric(
        lambda o: one.low if (one := o.evidence.score) else None, "lower end of its 95% interval"
    )
    score_difference_high: float | None = metric(
        lambda o: one.high if (one := o.evidence.score) else None, "upper end of its 95% interval"
    )
    n_scored: int = metric(
        lambda o: o.evidence.scored,
        "questions whose answers were scored",
        heading="n",
        form=lambda n: _whole(n or None),
        when=_lossy,
    )
    over_random: float | None = metric(
        None,
        "mean score minus that of its random control, which accepts as many tokens",
        default=None,
    )
    over_random_low: float | None = metric(None, "lower end of its 95% interval", default=None)
    over_random_high: float | None = metric(None, "upper end of its 95% interval", default=None)
    n_prompts: int = metric(
        lambda o: len({r.prompt_id for r in o.records}),
        "number of questions",
        heading="n",
        form=_whole,
    )
    n_outputs: int = metric(lambda o: len(o.worst), "number of outputs")
    n_cells: int = metric(lambda o: len(o.records), "number of records (outputs times repeats)")
    n_void: int = metric(
        lambda o: sum(r.void for r in o.records), "number of records with noisy times"
    )
    target_model: str | None = metric(
        None,
        "name of the target",
        heading="target",
        form=text_or_none,
        align="l",
        choose=True,
        plain=True,
        when=_differs_in("target_model"),
        default=None,
    )
    draft_model: str | None = metric(
        None,
        "draft model that it uses",
        heading="draft",
        form=text_or_none,
        align="l",
        choose=True,
        plain=True,
        when=_differs_in("draft_model", None),
        default=None,
    )

    @classmethod
    def from_outputs(cls, outputs: MethodOutputs) -> MethodSummary:
        """Compute all metrics from the outputs of a method."""
        return cls(
            **{name: m.compute(outputs) for name, m in METRICS.items() if m.compute is not None}
        )

    @property
    def per_forward(self) -> float | None:
        """Tokens per target forward. None if there are no forwards or their number is unknown."""
        return 1 / self.verification_rate if self.verification_rate else None

    @property
    def per_device(self) -> float | None:
        """Speedup divided by the number of devices."""
        return None if self.speedup is None else self.speedup / self.devices

    @property
    def order_matters(self) -> bool:
        """True if the method learns across prompts, so that its results depend on their order."""
        return self.state_scope not in (None, "prompt")

    @property
    def engine(self) -> str:
        """Label of the vanilla method in the method's own engine. "" for methods of specbench's
        engine.
        """
        return "" if self.baseline == BASELINE else self.baseline


METRICS: dict[str, Metric] = {
    field.name: field.metadata["metric"] for field in fields(MethodSummary)
}
"""All metrics by name."""
NULLABLE_NUMBERS = [
    f.name for f in fields(MethodSummary) if f.type in ("float | None", "int | None")
]
"""Names of the metrics that are numbers or None."""


MAX_RATE_DIFFERENCE = 0.05
"""Maximum difference between the acceptance rates of a lossy method and of its control."""


def same_group(row: MethodSummary, ranked: Iterable[MethodSummary]) -> list[str]:
    """Return the labels of the methods that do not differ significantly from `row`."""
    own = set(letters_of(row))
    return [
        other.label
        for other in ranked
        if other is not row and other.baseline == row.baseline and own & set(letters_of(other))
    ]


def matches_rate(control: MethodSummary, row: MethodSummary) -> bool:
    """Return True if a control accepts about as many tokens as a method's lossy accept rule."""
    rate = row.rule_rate
    return rate is None or abs(control.params.get("rate", 0.0) - rate) <= MAX_RATE_DIFFERENCE


# ---- columns -------------------------------------------------------------------------------------


def text_column(
    heading: str,
    name: str,
    format_row: Callable[[MethodSummary], str],
    meaning: str = "",
    **more: Any,
) -> Column[MethodSummary]:
    """Return a column of texts. Programs get the same texts (`Column.data`)."""
    return Column(heading, meaning, "l", format=format_row, data={name: format_row}, **more)


def _values(*names: str, **renamed: str) -> dict[str, Callable[[MethodSummary], Value]]:
    """Return the data of a column that shows several metrics.

    Args:
        names: Metrics that keep their names.
        renamed: TSV name -> metric.
    """
    every = {name: name for name in names} | renamed
    return {tsv: attrgetter(name) for tsv, name in every.items()}


_COLUMNS = {name: m.column(name) for name, m in METRICS.items() if m.heading}

METHOD, GROUP, SPEEDUP, MAT, TOKENS, QUESTIONS, SCORED, RULE_RATE, RELAXED = (
    _COLUMNS[name]
    for name in (
        *("label", "letters", "speedup", "mat", "tokens_per_s", "n_prompts", "n_scored"),
        *("rule_rate", "relaxed"),
    )
)
INTERVAL = Column(
    "95% CI",
    "confidence interval of this speedup alone, by bootstrap-t over questions",
    "c",
    format=interval,
    data=_values(ci_low="speedup_low", ci_high="speedup_high"),
)
DECODE_INTERVAL = replace(
    INTERVAL,
    heading="decode 95% CI",
    format=lambda row: bounds(row.decode_speedup_low, row.decode_speedup_high),
    data=_values(decode_low="decode_speedup_low", decode_high="decode_speedup_high"),
)
TOKEN_ACCOUNTING = tuple(
    _COLUMNS[name]
    for name in (
        *("draft_kept", "draft_discarded", "target_kept", "target_discarded", "method_kept"),
        "scored",
    )
)
"""Token accounting of lossy methods: tokens by author, kept or discarded."""
ACCURACY_LOSS = Column(
    "less vanilla's",
    "accuracy minus vanilla's on the same questions, in percentage points, with the 95% bootstrap-t"
    " interval over questions",
    format=accuracy_loss,
    data=_values("score_difference", "score_difference_low", "score_difference_high"),
    when=_lossy,
)
OVER_RANDOM = Column(
    "over random",
    "accuracy minus that of a random control that accepts as many tokens, in percentage points,"
    " with the 95% interval",
    format=lambda row: points(row.over_random, row.over_random_low, row.over_random_high),
    data=_values("over_random", "over_random_low", "over_random_high"),
    when=any_has("over_random"),
)
PER_DEVICE = Column(
    "per device",
    "speedup / number of devices that its workers used",
    format=lambda row: ratio(row.per_device),
    data=_values(speedup_per_device="per_device", devices="devices"),
    when=lambda rows: any(row.devices > 1 for row in rows),
)
PER_FORWARD = Column(
    "tok/fwd",
    "tokens per target forward",
    format=lambda row: number(row.per_forward),
    data=_values("per_forward"),
)
TIME = Column(
    "time",
    "shares of decode time: target, draft, host",
    "l",
    format=_time,
    data=_values(target="share_target", draft="share_draft", host="share_host"),
    look=lambda row: "time" if _shares(row) else "",
    shares=_shares,
)
OUTPUT = text_column(
    "output",
    "output",
    verdicts,
    "verdicts on the outputs",
    look=lambda row: "broken" if row.broken or row.failed or row.mismatch else "",
)
KIND = text_column(
    "kind", "kind", _kind, "own method, or a peer (another implementation)", choose=True
)
PARAMETERS = text_column(
    "parameters",
    "parameters",
    lambda row: " ".join(format_params(row.params)) or NONE,
    look=lambda _: "long",
)
CHOSEN = replace(
    _COLUMNS["params_from"],
    heading="params",
    when=lambda rows: any(row.params_from not in (None, "default") for row in rows),
)
POSITIONS = Column(
    "accepted at level 1, 2, ...",
    METRICS["acceptance_by_position"].meaning,
    format=_positions,
    data={"at_level_1": lambda row: next(iter(row.acceptance_by_position), None)},
)
VALID = Column(
    "valid",
    "outputs that match the grammar, of those that are complete",
    format=lambda row: NONE if row.valid is None else f"{row.valid} of {row.complete}",
    data=_values("valid", "complete", "cut"),
    when=any_has("valid"),
)
NOISY = Column(
    "noisy",
    "outputs that were measured while other programs were running",
    format=lambda row: f"{row.n_void} of {row.n_cells}",
    data=_values("n_void"),
)


# ---- tables --------------------------------------------------------------------------------------


def table(*columns: str | Column[MethodSummary]) -> tuple[Column[MethodSummary], ...]:
    """Return the columns of a table.

    Args:
        columns: Columns, or names of metrics that have a column.
    """
    return tuple(_COLUMNS[each] if isinstance(each, str) else each for each in columns)


TERMINAL = table(
    METHOD, SPEEDUP, INTERVAL, GROUP, MAT, "acceptance_rate", "work", RELAXED, TOKENS, CHOSEN, TIME,
    OUTPUT,
)  # fmt: skip
BY_TARGET = table(
    METHOD, "target_model", "draft_model", "synthetic", SPEEDUP, INTERVAL, MAT, "acceptance_rate",
    "work", RELAXED, TOKENS, OUTPUT,
)  # fmt: skip
"""Terminal table of several targets."""
LOSSY = table(
    METHOD, "target_model", "draft_model", SPEEDUP, INTERVAL, ACCURACY_LOSS, SCORED, OVER_RANDOM,
    PER_FORWARD,
)  # fmt: skip
"""Terminal table of lossy methods: speed and quality."""
WITH_SPEEDUP = (INTERVAL, ACCURACY_LOSS, SCORED)
"""Columns that are never separated from a lossy method's speedup."""
DATA = table(
    GROUP, METHOD, "guarantee", "state_scope", SPEEDUP, INTERVAL, "params_from", MAT,
    "acceptance_rate", RELAXED, "work", TOKENS, TIME, "score", ACCURACY_LOSS, OVER_RANDOM, SCORED,
    *TOKEN_ACCOUNTING, VALID, OUTPUT, "tokens_per_joule", PER_DEVICE, "synthetic", "target_model",
    "draft_model",
)  # fmt: skip
"""Columns of the terminal table in TSV and JSON."""
SPEED = table(
    METHOD, GROUP, SPEEDUP, INTERVAL, ACCURACY_LOSS, OVER_RANDOM, SCORED, "decode_speedup",
    DECODE_INTERVAL, MAT, "acceptance_rate", RELAXED, "synthetic",
)  # fmt: skip
"""Table for a paper: speedup, its interval, and acceptance."""
COST = table(
    METHOD, TOKENS, "ttft_p50_ms", "ms_per_token_p50", "ms_per_token_p95", "work", "peak_bytes",
    "tokens_per_joule", PER_DEVICE, OUTPUT, "synthetic",
)  # fmt: skip
"""Table for a paper: costs per token, and verdicts on the outputs."""
PAGE = table(
    GROUP, METHOD, SPEEDUP, INTERVAL, ACCURACY_LOSS, OVER_RANDOM, SCORED, "decode_speedup", MAT,
    "acceptance_rate", RELAXED, RULE_RATE, "accept_rule", *TOKEN_ACCOUNTING, TOKENS, OUTPUT, TIME,
    "ttft_p50_ms", "ms_per_token_p50", "ms_per_token_p95", "peak_bytes", KIND, "work", "score",
    "target_model", "draft_model", "tokens_per_joule", PER_DEVICE, "synthetic",
)  # fmt: skip
LOSSY_PAGE = table(
    METHOD, SPEEDUP, ACCURACY_LOSS, SCORED, INTERVAL, "score", OVER_RANDOM, PER_FORWARD, RULE_RATE,
    RELAXED, *TOKEN_ACCOUNTING, "accept_rule", "decode_speedup", MAT, "acceptance_rate", TOKENS,
    OUTPUT, TIME,
    "ttft_p50_ms", "ms_per_token_p50", "ms_per_token_p95", "peak_bytes", KIND, "work",
    "target_model", "draft_model", "tokens_per_joule", PER_DEVICE, "synthetic",
)  # fmt: skip
"""HTML table of lossy methods. Speed and accuracy come first, so that a narrow screen shows both.

There are no group letters, since lossy methods are not ranked by speed alone.
"""
LEFT_OUT_OF_BRIEF = table("ttft_p50_ms", "ms_per_token_p50", "ms_per_token_p95", "peak_bytes", KIND)
"""Columns of `PAGE` that the table of a notebook omits, because it is narrower."""
DETAIL = table(
    METHOD, PARAMETERS, "params_from", "mat_macro", "mat_full", "alpha", POSITIONS,
    "nodes_per_step", "node_yield", RELAXED, RULE_RATE, "reuse_rate", "target_forwards",
    "draft_forwards", NOISY,
)  # fmt: skip
"""Parameters and counters."""
EQUIVALENCE = table(
    METHOD, "guarantee", replace(OUTPUT, heading="outputs"), VALID, "questions_checked",
    "questions_mismatched", "mismatch_bound", "near_tie", "near_tie_expected", "near_tie_p",
    "near_tie_explained", "broken_why",
)  # fmt: skip
"""Table of verdicts on the outputs, with the bound on the mismatch rate."""
EVIDENCE = table(
    METHOD, "log_likelihood_difference", "log_likelihood_p", "length_difference", "length_p"
)
"""Table of differences between sampled outputs and vanilla's."""

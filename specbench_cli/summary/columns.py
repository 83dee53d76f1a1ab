"""The columns of every table of rows, declared once: heading, meaning, what each shows of a row.

A rendering (terminal, TSV, Markdown, LaTeX, HTML, gallery) chooses among them and decides only how
a cell looks. A new column is declared here and named in the tables below that are to have it.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from operator import attrgetter
from typing import Any, Literal

from specbench_cli.config.sweep import settings, written
from specbench_cli.summary import text
from specbench_cli.summary.pareto import Sweep
from specbench_cli.summary.row import Row

Align = Literal["l", "r", "c"]
Value = str | int | float | bool | None


@dataclass(frozen=True, slots=True)
class Heading:
    """A column's heading. meaning: in a sentence, where it is not plain. choose: whether rows can
    be chosen by its words."""

    heading: str
    meaning: str = ""
    align: Align = "r"
    choose: bool = False


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Column(Heading):
    """A column of rows.

    shown: a row's cell in words.
    data: the same for programs, a name each; a table is sorted by the first.
    when: of which rows it has something to say; it is left out of tables of others.
    """

    shown: Callable[[Row], str]
    data: Mapping[str, Callable[[Row], Value]]
    when: Callable[[Sequence[Row]], bool] = lambda _: True

    def value(self, row: Row) -> Value:
        """What the cell is sorted by; None where it shows nothing."""
        nothing = self.shown(row) in ("", text.NONE)
        return None if nothing else next(iter(self.data.values()))(row)


def of(columns: Sequence[Column], rows: Sequence[Row]) -> list[Column]:
    """Those that have something to say of some rows."""
    return [column for column in columns if column.when(rows)]


def _known(name: str) -> Callable[[Sequence[Row]], bool]:
    """Whether some row has a figure."""
    return lambda rows: any(getattr(row, name) is not None for row in rows)


def _figure(
    heading: str,
    name: str,
    form: Callable[[Any], str] = text.number,
    meaning: str = "",
    *,
    data: str | None = None,
    **more: Any,
) -> Column:
    """The column of a row's attribute; in data it has its own name, or another."""
    get = attrgetter(name)
    return Column(
        heading, meaning, shown=lambda row: form(get(row)), data={data or name: get}, **more
    )


def _words(
    heading: str, name: str, shown: Callable[[Row], str], meaning: str = "", **more: Any
) -> Column:
    return Column(heading, meaning, "l", shown=shown, data={name: shown}, **more)


def _or_none(value: str | None) -> str:
    return value or text.NONE


def _kind(row: Row) -> str:
    special = "upper bound" if row.upper_bound else "control" if row.control else "ours"
    return "peer" if row.peer else special


def _time(row: Row) -> str:
    shares = {"target": row.share_target, "draft": row.share_draft, "host": row.share_host}
    if None in shares.values():
        return text.NONE
    return ", ".join(f"{name} {share:.0%}" for name, share in shares.items())


def _positions(row: Row) -> str:
    return ", ".join(map(text.percent, row.acceptance_by_position[:8])) or text.NONE


_whole, _tenths, _thousandths = (partial(text.number, digits=n) for n in (0, 1, 3))

METHOD = _words("method", "method", lambda row: row.label)
GROUP = Column(
    "group",
    "rows that share a letter do not differ significantly; letters compare all pairs at once",
    "l",
    shown=text.group,
    data={"group": lambda row: row.letters},
)
GUARANTEE = Column(
    "guarantee",
    align="l",
    choose=True,
    shown=lambda row: row.guarantee.replace("_", " "),
    data={"guarantee": lambda row: row.guarantee},
)
SCOPE = _figure("state", "state_scope", _or_none, align="l")
SYNTHETIC = Column(
    "models",
    "synthetic: weights were drawn at random; no figure of such a row is a model's",
    "l",
    shown=lambda row: "synthetic" if row.synthetic else "real",
    data={"synthetic": lambda row: row.synthetic},
    when=_known("synthetic"),
)
QUESTIONS = _figure("n", "n_prompts", _whole, "questions that the figures are of")
SPEEDUP = Column(
    "speedup",
    "vanilla's time / the method's, paired on prompts",
    shown=text.speedup,
    data={"speedup": lambda row: row.speedup},
)
INTERVAL = Column(
    "95% CI",
    "interval of this row's speedup by itself, by bootstrap-t over questions",
    "c",
    shown=text.interval,
    data={"ci_low": lambda row: row.speedup_low, "ci_high": lambda row: row.speedup_high},
)
DECODE = _figure("decode", "decode_speedup", text.ratio, "speedup of decoding: without prefill")
DECODE_INTERVAL = replace(
    INTERVAL,
    heading="decode 95% CI",
    shown=lambda row: text.between(row.decode_speedup_low, row.decode_speedup_high),
    data={
        "decode_low": lambda row: row.decode_speedup_low,
        "decode_high": lambda row: row.decode_speedup_high,
    },
)
MAT = _figure("MAT", "mat", meaning="mean accepted tokens: committed a step")
ACCEPT = _figure(
    "accept", "acceptance_rate", text.percent, "levels accepted / drafted", data="accept"
)
RELAXED = _figure(
    "relaxed",
    "relaxed",
    text.percent,
    "share of the tokens that stand by a lossy accept rule alone",
    when=_known("relaxed"),
)
RULE_RATE = _figure(
    "rule rate",
    "rule_rate",
    text.percent,
    "share of the rejected levels, or of the judged steps, that the accept rule let pass",
    when=_known("rule_rate"),
)
_WRITTEN = {
    "draft kept": ("draft_kept", "tokens of the draft's that stand in the outputs"),
    "draft discarded": ("draft_discarded", "tokens of the draft's that do not"),
    "target kept": ("target_kept", "tokens of the target's that do"),
    "target discarded": ("target_discarded", "tokens of the target's that do not"),
    "method's own": ("method_kept", "words that no model wrote"),
    "scored": ("scored", "tokens that the target read to judge them"),
}
LEDGER = tuple(
    _figure(heading, name, _whole, meaning, when=_known(name))
    for heading, (name, meaning) in _WRITTEN.items()
)
"""Who wrote the tokens of lossy rows, and what became of them."""
RULE = _figure("accept rule", "accept_rule", _or_none, align="l", when=_known("accept_rule"))
WORK = _figure("work", "work", meaning=text.WORK, when=text.has_partial)
TOKENS = _figure("tok/s", "tokens_per_s", _whole, "tokens / wall time")
TTFT = _figure("TTFT p50 ms", "ttft_p50_ms", _tenths, "time to the first token, median")
MEDIAN = _figure(
    "ms/token p50", "ms_per_token_p50", meaning="decode time a token, median over outputs"
)
P95 = _figure("p95", "ms_per_token_p95", meaning="decode time a token, 95th percentile, ms")
PEAK = Column(
    "peak MB",
    "largest peak of memory",
    shown=lambda row: _whole(None if row.peak_bytes is None else row.peak_bytes / 1e6),
    data={"peak_bytes": lambda row: row.peak_bytes},
)
PER_DEVICE = Column(
    "per device",
    "speedup / devices that its workers computed on",
    shown=lambda row: text.ratio(row.per_device),
    data={"speedup_per_device": lambda row: row.per_device, "devices": lambda row: row.devices},
    when=lambda rows: any(row.devices > 1 for row in rows),
)
ENERGY = _figure(
    "tok/J",
    "tokens_per_joule",
    meaning="tokens / joules of the machine's counters (RAPL, NVML), all that runs on it included",
    when=_known("tokens_per_joule"),
)
TIME = Column(
    "time goes to",
    "of decoding: target, draft, host",
    "l",
    shown=_time,
    data={
        "target": lambda row: row.share_target,
        "draft": lambda row: row.share_draft,
        "host": lambda row: row.share_host,
    },
)
OUTPUT = _words("output", "output", text.verdicts, "verdicts on the outputs")
TARGET = _figure(
    "target",
    "target_model",
    _or_none,
    align="l",
    choose=True,
    when=lambda rows: len({row.target_model for row in rows}) > 1,
)
DRAFT = replace(
    TARGET,
    heading="draft",
    shown=lambda row: _or_none(row.draft_model),
    data={"draft_model": lambda row: row.draft_model},
    when=lambda rows: len({row.draft_model for row in rows} - {None}) > 1,
)
KIND = _words("kind", "kind", _kind, "ours or a peer's", choose=True)
ACCURACY = _figure(
    "accuracy",
    "score",
    text.percent,
    "mean score of the answers",
    data="accuracy",
    when=_known("score"),
)
SCORED = _figure(
    "n",
    "n_scored",
    lambda n: _whole(n or None),
    "questions whose answers were scored",
    when=lambda rows: not all(row.lossless for row in rows),
)
LOST = Column(
    "less vanilla's",
    "points of accuracy less vanilla's on the same questions, with the 95% interval by bootstrap-t"
    " over questions",
    shown=text.lost,
    data={
        name: attrgetter(name)
        for name in ("score_difference", "score_difference_low", "score_difference_high")
    },
    when=SCORED.when,
)
OVER_RANDOM = Column(
    "over random",
    "points of accuracy more than its random control's, which lets as many pass, with the 95%"
    " interval",
    shown=text.over_random,
    data={
        name: attrgetter(name) for name in ("over_random", "over_random_low", "over_random_high")
    },
    when=_known("over_random"),
)
PER_FORWARD = _figure("tok/fwd", "per_forward", meaning="tokens a target forward")
PARAMETERS = _words(
    "parameters", "parameters", lambda row: " ".join(settings(row.params)) or text.NONE
)
SOURCE = _figure("from", "params_from", _or_none, "where the parameters come from", align="l")
CHOSEN = replace(
    SOURCE,
    heading="params",
    when=lambda rows: any(row.params_from not in (None, "default") for row in rows),
)
VALID = Column(
    "valid",
    "outputs that belong to the grammar, of those that are complete",
    shown=lambda row: text.NONE if row.valid is None else f"{row.valid} of {row.complete}",
    data={
        "valid": lambda row: row.valid,
        "complete": lambda row: row.complete,
        "cut": lambda row: row.cut,
    },
    when=_known("valid"),
)
DISCARDED = _figure(
    "discarded", "discard_rate", meaning="drafted tokens that do not stand / tokens"
)
VERIFIED = _figure("verified", "verification_rate", meaning="target forwards / tokens")

TERMINAL = (
    GROUP, METHOD, SPEEDUP, INTERVAL, MAT, ACCEPT, WORK, RELAXED, TOKENS, CHOSEN, TIME, OUTPUT,
)  # fmt: skip
BY_TARGET = (
    METHOD, TARGET, DRAFT, SYNTHETIC, SPEEDUP, INTERVAL, MAT, ACCEPT, WORK, RELAXED, TOKENS, OUTPUT,
)  # fmt: skip
"""Of a terminal's table of several targets."""
LOSSY = (
    METHOD, TARGET, DRAFT, SPEEDUP, INTERVAL, LOST, SCORED, OVER_RANDOM, PER_FORWARD,
)  # fmt: skip
"""Of a terminal's lossy rows: speed and quality."""
WITH_SPEEDUP = (INTERVAL, LOST, SCORED)
"""What always stands beside a lossy row's speedup."""
DATA = (
    GROUP, METHOD, GUARANTEE, SCOPE, SPEEDUP, INTERVAL, SOURCE, MAT, ACCEPT, RELAXED, WORK, TOKENS,
    TIME, ACCURACY, LOST, OVER_RANDOM, SCORED, *LEDGER, VALID, OUTPUT, ENERGY, PER_DEVICE,
    SYNTHETIC, TARGET, DRAFT,
)  # fmt: skip
"""TSV and JSON of a terminal's table."""
SPEED = (
    METHOD, GROUP, SPEEDUP, INTERVAL, LOST, OVER_RANDOM, SCORED, DECODE, DECODE_INTERVAL, MAT,
    ACCEPT, RELAXED, SYNTHETIC,
)  # fmt: skip
"""Of a paper: how much faster, how sure, and how much of the drafts is accepted."""
COST = (METHOD, TOKENS, TTFT, MEDIAN, P95, WORK, PEAK, ENERGY, PER_DEVICE, OUTPUT, SYNTHETIC)
"""Of a paper: what a token costs, and what became of the outputs."""
PAGE = (
    GROUP, METHOD, SPEEDUP, INTERVAL, LOST, OVER_RANDOM, SCORED, DECODE, MAT, ACCEPT, RELAXED,
    RULE_RATE, RULE, *LEDGER, TOKENS, OUTPUT, TIME, TTFT, MEDIAN, P95, PEAK, KIND, WORK, ACCURACY,
    TARGET, DRAFT, ENERGY, PER_DEVICE, SYNTHETIC,
)  # fmt: skip
LOSSY_PAGE = (
    METHOD, SPEEDUP, LOST, SCORED, INTERVAL, ACCURACY, OVER_RANDOM, PER_FORWARD, RULE_RATE,
    RELAXED, *LEDGER, RULE, DECODE, MAT, ACCEPT, TOKENS, OUTPUT, TIME, TTFT, MEDIAN, P95, PEAK,
    KIND, WORK, TARGET, DRAFT, ENERGY, PER_DEVICE, SYNTHETIC,
)  # fmt: skip
"""Of a page's lossy rows: what they gain and lose comes first, in sight on a telephone; no letter
ranks them by speed alone."""
LEFT_OUT_OF_BRIEF = (TTFT, MEDIAN, P95, PEAK, KIND)
"""Of a page, but not of a notebook's table, which has the width of a page of text: a data frame has
them."""
DETAIL = (
    METHOD,
    PARAMETERS,
    SOURCE,
    Column(
        "MAT, macro",
        "mean over outputs",
        shown=lambda row: (
            text.number(row.mat_macro) + (f" ({row.mat_note})" if row.mat_note else "")
        ),
        data={"mat_macro": lambda row: row.mat_macro},
    ),
    _figure(
        "MAT, full steps",
        "mat_full",
        meaning="without each output's last step, which its end may cut",
    ),
    _figure("alpha", "alpha", text.percent, "accepted / tested"),
    Column(
        "accepted at level 1, 2, ...",
        "of the steps that drafted the level",
        shown=_positions,
        data={"at_level_1": lambda row: next(iter(row.acceptance_by_position), None)},
    ),
    _figure("nodes a step", "nodes_per_step", _tenths, "drafted tokens"),
    _figure("node yield", "node_yield", text.percent, "accepted / nodes"),
    RELAXED,
    RULE_RATE,
    _figure(
        "reused",
        "reuse_rate",
        text.percent,
        "drafts that were prepared before their outcome was known",
    ),
    _figure("target forwards", "target_forwards", _whole),
    _figure("draft forwards", "draft_forwards", _whole),
    Column(
        "void cells",
        "measured while the machine was not quiet",
        shown=lambda row: f"{row.n_void} of {row.n_cells}",
        data={"n_void": lambda row: row.n_void},
    ),
)
"""What a row was run with, and its counters."""
EQUIVALENCE = (
    METHOD,
    GUARANTEE,
    replace(OUTPUT, heading="outputs"),
    VALID,
    _figure("questions checked", "questions_checked", _whole),
    _figure("mismatched", "questions_mismatched", _whole),
    _figure(
        "at most (95%)",
        "mismatch_bound",
        partial(text.percent, digits=2),
        "what that proves of the rate of mismatches",
    ),
    _figure("near-ties", "near_tie", _whole),
    _figure("expected at most", "near_tie_expected", meaning="near-ties that rounding makes"),
    _figure("p", "near_tie_p", _thousandths, "that rounding makes so many"),
    _figure(
        "explained by width",
        "near_tie_explained",
        _whole,
        "near-ties that vanilla's forward at the verify width shares",
    ),
    _figure("what is wrong", "broken_why", _or_none, align="l"),
)
"""What became of the outputs, and what that proves."""
EVIDENCE = (
    METHOD,
    _figure("log-likelihood a token", "log_likelihood_difference", partial(text.number, digits=4)),
    _figure("p of that", "log_likelihood_p", _thousandths),
    _figure("length", "length_difference", _tenths),
    _figure("p of the length", "length_p", _thousandths),
)
"""Sampled outputs, less vanilla's."""


def swept(sweep: Sweep) -> tuple[Column, ...]:
    """Those of a sweep's rows: its parameters, what they cost and gain, and the Pareto front."""
    front = {point.row.label for point in sweep.points if point.front}
    return (
        METHOD,
        *map(_param, sweep.params),
        *(MAT, ACCEPT, SPEEDUP, INTERVAL, LOST, OVER_RANDOM, SCORED, MEDIAN, DISCARDED, VERIFIED),
        _words("Pareto front", "front", lambda row: "yes" if row.label in front else text.NONE),
    )


def _param(name: str) -> Column:
    """A parameter, which some methods do not have; numbers sort as numbers."""

    def value(row: Row) -> Value:
        found = row.params.get(name)
        return found if found is None or isinstance(found, int | float) else written(found)

    def shown(row: Row) -> str:
        found = row.params.get(name)
        return text.NONE if found is None else written(found)

    return Column(name, shown=shown, data={name: value})

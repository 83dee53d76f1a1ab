"""The columns of the page's tables: what each shows of a row, and by what it is sorted."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from specbench_cli.config.sweep import settings, written
from specbench_cli.report.numbers.row import Row
from specbench_cli.report.terminal import text

Value = str | int | float | bool | None


@dataclass(frozen=True, slots=True)
class Cell:
    """What a cell shows and is sorted by. kind: its look. shares: of a bar; their sum is 1. link:
    where it leads, if anywhere."""

    shown: str
    value: Value = None
    kind: str = ""
    shares: tuple[float, ...] = ()
    link: str = ""


@dataclass(frozen=True, slots=True)
class Column:
    """A column. title: what the heading means. choose: whether rows can be chosen by its words."""

    heading: str
    title: str = ""
    numeric: bool = True
    choose: bool = False


Figure = tuple[Column, Callable[[Row], Cell]]
"""A column, and what it shows of a row."""


def word(shown: str, kind: str = "") -> Cell:
    """A text, sorted as it reads; none has no place."""
    return Cell(shown, None if shown == text.NONE else shown, kind)


def number(value: float | None, digits: int = 2) -> Cell:
    """A figure."""
    return Cell(text.number(value, digits), value)


def percent(value: float | None, digits: int = 0) -> Cell:
    """A share or a rate."""
    return Cell(text.percent(value, digits), value)


def param(row: Row, name: str) -> Cell:
    """A parameter's value; some methods do not have it."""
    value = row.params.get(name)
    if value is None:
        return Cell(text.NONE)
    return Cell(written(value), value if isinstance(value, int | float) else written(value))


def _method(row: Row) -> Cell:
    return word(row.label, "peer" if row.peer else "bound" if row.upper_bound else "")


def _kind(row: Row) -> Cell:
    special = "upper bound" if row.upper_bound else "control" if row.control else "ours"
    return word("peer" if row.peer else special)


def _speedup(row: Row) -> Cell:
    return Cell(text.speedup(row), row.speedup, "broken" if row.broken else "strong")


def _interval(row: Row) -> Cell:
    return Cell(text.interval(row), row.speedup_low)


def _time(row: Row) -> Cell:
    shares = (row.share_target, row.share_draft, row.share_host)
    known = tuple(share for share in shares if share is not None)
    if len(known) < len(shares):
        return Cell(text.NONE)
    names = ("target", "draft", "host")
    said = ", ".join(f"{n} {share:.0%}" for n, share in zip(names, known, strict=True))
    return Cell(said, row.share_target, "time", known)


def _verdicts(row: Row) -> Cell:
    bad = row.broken or row.failed or row.mismatch
    return word(text.verdicts(row), "broken" if bad else "")


METHOD: Figure = (Column("method", numeric=False), _method)
GROUP: Figure = (
    Column("group", "rows that share a letter do not differ significantly", numeric=False),
    lambda row: word(row.letters or text.NONE, "letters"),
)
RANK: tuple[Figure, ...] = (GROUP, METHOD)
SPEED: tuple[Figure, ...] = (
    (Column("speedup", "vanilla's time / the method's, paired on prompts"), _speedup),
    (Column("95% CI", "interval of the speedup, by bootstrap-t over questions"), _interval),
)
FIGURES: tuple[Figure, ...] = (
    *SPEED,
    (
        Column("decode speedup", "the same without prefill"),
        lambda row: Cell(text.ratio(row.decode_speedup), row.decode_speedup),
    ),
    (Column("MAT", "mean accepted tokens: committed a step"), lambda row: number(row.mat)),
    (
        Column("accept", "levels accepted / drafted"),
        lambda row: percent(row.acceptance_rate),
    ),
    (Column("tok/s", "tokens / wall time"), lambda row: number(row.tokens_per_s, 0)),
    (Column("output", "verdicts on the outputs", numeric=False), _verdicts),
    (Column("time goes to", "of decoding: target, draft, host"), _time),
    (
        Column("TTFT ms", "time to the first token, median"),
        lambda row: number(row.ttft_p50_ms, 1),
    ),
    (
        Column("ms/token", "decode time a token, median over outputs"),
        lambda row: number(row.ms_per_token_p50),
    ),
    (
        Column("p95", "decode time a token, 95th percentile, ms"),
        lambda row: number(row.ms_per_token_p95),
    ),
    (
        Column("peak MB", "largest peak of memory"),
        lambda row: number(None if row.peak_bytes is None else row.peak_bytes / 1e6, 0),
    ),
    (Column("kind", "ours or a peer's", numeric=False, choose=True), _kind),
)
_ACCEPT = next(at for at, (column, _) in enumerate(FIGURES) if column.heading == "accept")
LOSSY: tuple[Figure, ...] = (
    *FIGURES[: _ACCEPT + 1],
    (
        Column("relaxed", "share of the tokens that stand by a lossy accept rule alone"),
        lambda row: percent(row.relaxed),
    ),
    (
        Column("rule rate", "share of the rejected levels that the accept rule let pass"),
        lambda row: percent(row.rule_rate),
    ),
    (
        Column("accept rule", numeric=False),
        lambda row: word(row.accept_rule or text.NONE),
    ),
    *FIGURES[_ACCEPT + 1 :],
)
"""Those of lossy rows."""
DETAILS: tuple[Figure, ...] = (
    METHOD,
    (
        Column("parameters", numeric=False),
        lambda row: word(" ".join(settings(row.params)) or text.NONE, "long"),
    ),
    (
        Column("from", "where the parameters come from", numeric=False),
        lambda row: word(row.params_from or text.NONE),
    ),
    (
        Column("MAT, macro", "mean over outputs"),
        lambda row: number(row.mat_macro),
    ),
    (
        Column("MAT, full steps", "without each output's last step, which its end may cut"),
        lambda row: number(row.mat_full),
    ),
    (Column("alpha", "accepted / tested"), lambda row: percent(row.alpha)),
    (
        Column("accepted at level 1, 2, …", "of the steps that drafted the level"),
        lambda row: Cell(
            " ".join(text.percent(rate) for rate in row.acceptance_by_position[:8]) or text.NONE,
            next(iter(row.acceptance_by_position), None),
        ),
    ),
    (Column("nodes a step", "drafted tokens"), lambda row: number(row.nodes_per_step, 1)),
    (Column("node yield", "accepted / nodes"), lambda row: percent(row.node_yield)),
    (
        Column("reused", "drafts that were prepared before their outcome was known"),
        lambda row: percent(row.reuse_rate),
    ),
    (
        Column("target forwards"),
        lambda row: Cell(text.number(row.target_forwards, 0), row.target_forwards),
    ),
    (
        Column("draft forwards"),
        lambda row: Cell(text.number(row.draft_forwards, 0), row.draft_forwards),
    ),
    (
        Column("void cells", "measured while the machine was not quiet"),
        lambda row: Cell(f"{row.n_void} of {row.n_cells}", row.n_void),
    ),
)
EQUIVALENCE: tuple[Figure, ...] = (
    METHOD,
    (
        Column("guarantee", numeric=False, choose=True),
        lambda row: word(row.guarantee.replace("_", " ")),
    ),
    (Column("outputs", numeric=False), _verdicts),
    (Column("questions checked"), lambda row: number(row.questions_checked, 0)),
    (Column("mismatched"), lambda row: number(row.questions_mismatched, 0)),
    (
        Column("at most", "what that proves of the rate of mismatches, 95%"),
        lambda row: percent(row.mismatch_bound, 2),
    ),
    (Column("near-ties"), lambda row: number(row.near_tie, 0)),
    (
        Column("expected at most", "near-ties that rounding makes"),
        lambda row: number(row.near_tie_expected),
    ),
    (Column("p", "that rounding makes so many"), lambda row: number(row.near_tie_p, 3)),
    (
        Column("explained by width", "near-ties that vanilla's forward at the verify width shares"),
        lambda row: number(row.near_tie_explained, 0),
    ),
    (
        Column("what is wrong", numeric=False),
        lambda row: word(row.broken_why or text.NONE, "broken" if row.broken else ""),
    ),
)
EVIDENCE: tuple[Figure, ...] = (
    METHOD,
    (
        Column("log-likelihood a token"),
        lambda row: number(row.log_likelihood_difference, 4),
    ),
    (Column("p of that"), lambda row: number(row.log_likelihood_p, 3)),
    (Column("length"), lambda row: number(row.length_difference, 1)),
    (Column("p of the length"), lambda row: number(row.length_p, 3)),
)
SWEEP: tuple[Figure, ...] = (
    (Column("MAT"), lambda row: number(row.mat)),
    (Column("accept"), lambda row: percent(row.acceptance_rate)),
    *SPEED,
    (Column("ms/token"), lambda row: number(row.ms_per_token_p50)),
    (Column("discarded"), lambda row: number(row.discard_rate)),
    (Column("verified"), lambda row: number(row.verification_rate)),
)

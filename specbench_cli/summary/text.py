"""Notes on the tables of a report: section titles, explanations and warnings."""

from __future__ import annotations

from collections.abc import Iterable

from specbench_cli.store.schema import BASELINE
from specbench_cli.summary.facts import Facts
from specbench_cli.summary.formats import percent, ratio
from specbench_cli.summary.metrics import (
    MAX_RATE_DIFFERENCE,
    REPLAY,
    WORK,
    MethodSummary,
    group,
    has_partial,
    letters_of,
    matches_rate,
)
from specbench_cli.summary.summary import PEER_BASELINE, Summary

LOSSY = "lossy: speed and quality; the output is not vanilla's; not ranked with the above"
RUN_SCOPE = "run scope: learns across prompts; results depend on the order of the prompts"
LOSSY_RUN_SCOPE = (
    "lossy, and run scope: speed and quality; results depend on the order of the prompts"
)
LONGEST_ERROR = 200
"""Maximum number of characters of an error message in a warning."""
Sections = tuple[tuple[int, str], ...]
"""Sections of a table: (index of the first row, title) of each."""


def sections(rows: Iterable[MethodSummary]) -> Sections:
    """Return the sections of a table: methods that learn over the run, lossy ones, other engines.

    Rows before the first section are lossless methods of specbench's engine.
    """
    found: list[tuple[int, str]] = []
    before = ""
    for place, row in enumerate(rows):
        kind = (RUN_SCOPE if row.order_matters else "") if row.lossless else LOSSY
        if not row.lossless and row.order_matters:
            kind = LOSSY_RUN_SCOPE
        if row.engine:
            kind = other_engine(row.engine)
        if kind != before:
            found.append((place, kind))
            before = kind
    return tuple(found)


def other_engine(vanilla: str) -> str:
    """Return the section title for methods of another engine, which has its own vanilla."""
    return (
        f"another engine: speedups are over {vanilla}, letters compare only these methods; to"
        " compare engines, use tok/s"
    )


def letter_ranges(summary: Summary) -> list[str]:
    """Return a note that explains ranges of significance groups, such as A-D, if there are any."""
    return ["A-D: the letters A to D"] if any("-" in group(row) for row in summary.rows) else []


def prose(notes: Iterable[str]) -> str:
    """Join notes to sentences, with capital letters and full stops."""
    return " ".join(f"{note[0].upper()}{note[1:]}." for note in notes)


def work(summary: Summary) -> list[str]:
    """Return a note that explains the column "work", if tables have it."""
    return [f"work: {WORK}"] if has_partial(summary.rows) else []


def noise_floor(summary: Summary) -> str:
    """Format the noise floor, measured by comparing vanilla with itself (A/A)."""
    return "not measured" if summary.noise_floor is None else f"{summary.noise_floor:.1%}"


def vanilla_ratio(summary: Summary) -> str:
    """Format the speed of vanilla relative to hf:vanilla, transformers' own decoding."""
    if summary.vanilla_ratio is not None:
        return f"{summary.vanilla_ratio:.2f}"
    return "not known" if any(row.label == PEER_BASELINE for row in summary.rows) else "not run"


def proof(summary: Summary) -> str:
    """Return a sentence on what the comparison of outputs with vanilla's proves.

    It is about the method with the weakest proof.
    """
    weakest = summary.proof()
    if any(row.sampling == REPLAY for row in summary.rows):
        return "proof: none; all methods got vanilla's tokens (--verify replay)"
    wrong = [row for row in summary.rows if row.label == BASELINE and row.broken]
    if wrong:
        return "proof: none; vanilla's own output is wrong, and all methods are compared with it"
    if weakest is None:
        return "proof: no tokens were compared; to prove the distribution: specbench audit"
    row, bound = weakest
    prefix = f"{row.label} " if row.questions_mismatched else ""
    at_most = percent(bound, 0 if bound >= 0.1 else 1 if bound >= 0.01 else 2)
    return (
        f"proof: {prefix}{row.questions_mismatched} of {row.questions_checked} prompts differ from"
        f" vanilla (95% bound: {at_most})"
        + "".join(
            f"; transformers checked {row.reference_read} of its {row.n_outputs}"
            for row in summary.rows
            if row.label == BASELINE and row.reference_read
        )
    )


def near_ties(summary: Summary) -> list[str]:
    """Compare observed near-ties with those expected from rounding, one line per method."""
    judged = [row for row in summary.lossless if row.questions_checked and row.label != BASELINE]
    lines = [
        f"near-ties: {row.label} {row.near_tie} found"
        + (
            f", at most {row.near_tie_expected:.2g} expected (p {row.near_tie_p:.2g})"
            if row.near_tie_expected is not None and row.near_tie_p is not None
            else ""
        )
        + f", {row.near_tie_explained} explained by the width of verification"
        for row in judged
        if row.near_tie
    ]
    expected = [row.near_tie_expected for row in judged if row.near_tie_expected is not None]
    if lines or not expected:
        return lines
    return [f"near-ties: none found, at most {max(expected):.2g} expected from rounding"]


def evidence(summary: Summary) -> list[str]:
    """Compare sampled outputs with vanilla's: likelihood and length, one line per method."""
    return [
        f"evidence, not proof: {row.label} log-likelihood per token"
        f" {row.log_likelihood_difference:+.3f} (p {row.log_likelihood_p:.2f}),"
        f" length {row.length_difference:+.1f} (p {row.length_p:.2f})"
        + (
            f"; {row.likelihood_deviations:+.1f} deviations from the target's own distribution"
            if row.likelihood_deviations is not None
            else ""
        )
        for row in summary.rows
        if row.log_likelihood_difference is not None and row.length_difference is not None
    ]


MIN_QUESTIONS = 20
"""Minimum number of questions to rank methods.

Simulations validated the intervals from this number on (docs/explanations/statistics.md).
"""


def family(name: str, rows: Iterable[MethodSummary]) -> str:
    """Return the heading of a task family: its name and number of questions."""
    return f"{name} ({max((row.n_prompts for row in rows), default=0)})"


def small_families(summary: Summary, n: str = "(n)", advice: str = ": --limit") -> list[str]:
    """Return a note on the number of questions per task family, with a warning if it is small.

    Args:
        n: Where the table shows the number of questions.
        advice: Advice for the warning.
    """
    counts = [max(row.n_prompts for row in rows) for rows in summary.families.values() if rows]
    if not counts:
        return []
    note = f"{n}: number of questions of the task family"
    if min(counts) < MIN_QUESTIONS:
        note += f"; with fewer than {MIN_QUESTIONS}, a result is no reliable estimate{advice}"
    return [note]


def few_questions(summary: Summary, advice: str = "") -> list[str]:
    """Return a warning if the run has too few questions to rank methods.

    Args:
        advice: Advice for the warning.
    """
    n = max((row.n_prompts for row in summary.rows), default=0)
    if n >= MIN_QUESTIONS or not any(
        row.speedup is not None for row in summary.rows if not row.reference
    ):
        return []
    questions = "1 question" if n == 1 else f"{n} questions"
    return [
        f"{questions} are too few to rank methods (intervals are validated from"
        f" {MIN_QUESTIONS} on){advice}"
    ]


def more_questions(facts: Facts) -> str:
    """Return the advice for a run with too few questions, as the end of a warning."""
    return ": --limit 48" if facts.limited else "; this run's tasks have no more"


def rare_questions(summary: Summary) -> list[str]:
    """Return a warning if a few outlier questions decide the speedup of a method."""
    found = [
        f"{row.label} {row.rare_questions} of {row.n_prompts}, {ratio(row.speedup_without_rare)}"
        " without"
        for row in summary.rows
        if row.rare_questions
    ]
    if not found:
        return []
    return [
        f"rare questions decide speedups: {'; '.join(found)}; another run may have more or none of"
        " them, and the interval does not include that: run more questions"
    ]


def two_intervals(summary: Summary) -> list[str]:
    """Return a note on the difference between the interval of a method and the group letters."""
    if not any(row.letters and row.speedup_low is not None for row in summary.rows):
        return []
    return [
        "the 95% CI compares one method with vanilla; letters compare all pairs: rank by letters"
    ]


def disagreements(summary: Summary) -> list[str]:
    """Return notes on methods whose interval and group letters seem to contradict each other."""
    baseline = next((row for row in summary.rows if row.label == BASELINE and row.letters), None)
    if baseline is None:
        return []
    own: dict[bool, list[str]] = {True: [], False: []}
    for row in summary.rows:
        if row is baseline or not row.letters or row.engine:
            continue
        low, high = row.speedup_low, row.speedup_high
        excludes = low is not None and high is not None and (low > 1 or high < 1)
        shares = bool(set(letters_of(row)) & set(letters_of(baseline)))
        if low is not None and excludes == shares:
            own[excludes].append(row.label)
    notes = []
    if own[True]:
        notes.append(
            f"{', '.join(own[True])}: differs from vanilla by its own interval, but not after"
            " correction for all pairs"
        )
    if own[False]:
        notes.append(
            f"{', '.join(own[False])}: its interval contains 1.00x, but the test of all pairs"
            " shows a difference from vanilla"
        )
    return notes


def one_process(summary: Summary) -> list[str]:
    """Return a warning that intervals are too narrow, if the run has only one process."""
    if summary.passes > 1 or not any(row.letters for row in summary.rows):
        return []
    return [
        "1 process: these intervals do not include variation between processes, so they are too"
        " narrow (where processes differ by 5%, a 95% interval covers 73%): --repeats 3"
    ]


def learning(summary: Summary) -> list[str]:
    """Return the share of time that each method spends on learning between requests."""
    return [
        f"learning: {row.label} {row.learn_share:.1%} of its time, between requests; the speedup"
        " includes it, the decode speedup does not"
        for row in summary.rows
        if row.learn_share is not None
    ]


def grammar(summary: Summary, facts: Facts) -> list[str]:
    """Return the number of complete, valid and cut outputs under the grammar."""
    labels_by_note: dict[str, list[str]] = {}
    for row in summary.rows:
        if row.complete is None or row.cut is None or row.valid is None:
            continue
        note = f"{row.complete} of {row.complete + row.cut} outputs complete"
        if row.complete:
            wrong = row.complete - row.valid
            note += f", {wrong} of them INVALID" if wrong else ", all of them valid"
        note += f"; {row.cut} cut at the token limit" if row.cut else ""
        labels_by_note.setdefault(note, []).append(row.label)
    prefixes = (
        labels if len(labels_by_note) > 1 else ["each method"] for labels in labels_by_note.values()
    )
    return [
        f"{facts.grammar_phrase}: {', '.join(labels)}: {note}"
        for labels, note in zip(prefixes, labels_by_note, strict=True)
    ]


def controls(summary: Summary) -> list[str]:
    """Return how to add a random control to each lossy method that lacks one.

    A control accepts as many rejected tokens as the method, but at random. It shows whether the
    method's accept rule is better than chance.
    """
    lines = []
    for row in summary.lossy:
        if row.control or not row.rule_rate or not row.accept_rule:
            continue
        own = [r for r in summary.rows if r.params.get("like") == row.label]
        mismatched_controls = [other for other in own if not matches_rate(other, row)]
        lines += [
            f"{r.label} is no control of {row.label}: it accepts"
            f" {percent(r.params.get('rate'))} of {_judged(row)}, and {row.label}"
            f" {percent(row.rule_rate)}"
            for r in mismatched_controls
        ]
        if own:
            continue
        rates = (other.rule_rate for other in summary.lossy if _controls(other, row))
        if any(
            rate is not None and abs(rate - row.rule_rate) <= MAX_RATE_DIFFERENCE for rate in rates
        ):
            continue
        name, rule, rate = row.method, row.params.get("accept"), f"{row.rule_rate:.3g}"
        if rule:
            how = f"--sweep {name}.accept={rule},random --set {name}.rate={rate}"
        elif "rate" in row.params:
            how = f"a second variant of {name} with rate={rate} (--config)"
        else:
            how = f"a variant of {name} with the accept rule RandomAccept({rate}), or random-accept"
        lines.append(
            f"no control accepts as many as {row.label}, {rate} of {_judged(row)}: add {how}"
        )
    return lines


def _judged(row: MethodSummary) -> str:
    """Return what a lossy accept rule decides about: tokens or reasoning steps.

    Methods that judge steps have a parameter `rate`.
    """
    return "the judged steps" if "rate" in row.params else "the rejected levels"


def _controls(other: MethodSummary, row: MethodSummary) -> bool:
    return other.control and other.method == row.method


def _shorten_error(error: str) -> str:
    return error if len(error) <= LONGEST_ERROR else f"{error[: LONGEST_ERROR - 1]}…"


def warnings(summary: Summary, facts: Facts) -> list[str]:
    """Return the warnings that a reader needs before using a result, one per line."""
    lines = []
    if facts.status == "interrupted":
        lines.append("interrupted: some outputs are missing (specbench run --resume)")
    if facts.status == "running":
        lines.append(
            "running, or killed: some outputs are missing, and noise is checked at the end of a run"
        )
    if facts.synthetic:
        lines.append(
            f"synthetic: {facts.synthetic}: this measures costs, not the speedup of a model"
        )
    if facts.noisy:
        lines.append("noisy: other programs were running and the times were kept (--allow-noise)")
    if facts.ended_early:
        lines.append("ended early: only vanilla was left")
    lines += [f"dropped after repeated failures: {what}" for what in facts.dropped]
    dropped = {what.partition(": ")[0] for what in facts.dropped}
    lines += [
        f"{row.label}: {row.failed} of {row.n_outputs} outputs failed:"
        f" {_shorten_error(row.failed_why)}"
        for row in summary.rows
        if row.failed_why is not None and row.label not in dropped
    ]
    lines += [f"left out, could not run here: {what}" for what in facts.left_out]
    lines += [f"mixed: {what} changed while the run was interrupted" for what in facts.mixed]
    lines += [
        f"embedded: plumbing: the model was not trained on {task}, so these speedups mean nothing"
        for task in facts.plumbing
    ]
    labels_by_note: dict[str, list[str]] = {}
    for row in summary.rows:
        if row.upper_bound:
            lines.append(
                f"{row.label}: an upper bound, not ranked: it uses vanilla's output to decide where"
                " to stop"
            )
        if row.text_compared:
            lines.append(
                f"{row.label}: text compared, not token ids: its engine reports none, so specbench"
                " tokenized its text"
            )
        if row.broken:
            lines.append(f"{row.label}: {row.speedup_note}")
        elif row.speedup_note is not None:
            missing = "speedup" if row.speedup is None else "interval"
            labels_by_note.setdefault(f"no {missing}: {row.speedup_note}", []).append(row.label)
    for note, labels in labels_by_note.items():
        every = 1 < len(labels) == len(summary.rows)
        lines.append(f"{'all methods' if every else ', '.join(labels)}: {note}")
    return lines

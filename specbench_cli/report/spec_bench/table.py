"""Results by Spec-Bench's formulas next to specbench's (`--also spec-bench`): tables and files."""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Callable, Iterable, Sequence
from dataclasses import asdict, dataclass
from hashlib import sha256
from pathlib import Path
from typing import Any

from specbench_cli.report.document import Grid, make_value_grid
from specbench_cli.report.spec_bench.files import ImportedAnswers, write_answers
from specbench_cli.report.spec_bench.formulas import (
    Answers,
    CountTokens,
    Decode,
    SpecBenchResult,
    collect_answers,
    compute_results,
)
from specbench_cli.report.tokens import decode_ids, load_tokenizer
from specbench_cli.store.schema import BASELINE
from specbench_cli.summary import formats, metrics, text
from specbench_cli.summary.columns import Heading, write_csv
from specbench_cli.summary.facts import Facts
from specbench_cli.summary.metrics import MethodSummary
from specbench_cli.summary.source import RecordSource
from specbench_cli.summary.summary import ALL, Summary

TITLE = "By Spec-Bench's formulas, and ours"
NOTE = (
    "Spec-Bench's speedup is a ratio of means: the method's mean tokens/s over questions, divided"
    " by the baseline's. It counts the baseline's tokens by tokenizing the text again, minus one"
    " token per turn. Its mean accepted tokens is a mean over steps. Our speedup pairs the times of"
    " each question and counts the generated tokens."
)
_LONGEST_SLUG = 60
"""Maximum number of characters of a file name without its hash."""
_OVERALL = (
    Heading("method", align="l"),
    *map(Heading, ("theirs: speedup", "MAT", "tok/s", "ours: speedup", "MAT", "tok/s")),
)


@dataclass(frozen=True, slots=True)
class SpecBench:
    """Results of a report by Spec-Bench's formulas and by specbench's own.

    Attributes:
        results: Results by Spec-Bench's formulas.
        rows: (label, family) -> specbench's own results.
        runs: Answers of specbench's own runs.
        notes: Deviations from Spec-Bench's formulas.
    """

    results: Sequence[SpecBenchResult]
    rows: dict[tuple[str, str], MethodSummary]
    runs: Sequence[Answers]
    notes: Sequence[str]

    def overall(self) -> Grid:
        """Return the table over all questions, with Spec-Bench's and specbench's results."""
        lines = []
        for found in self.results:
            if found.family == ALL:
                row = self.rows.get((found.label, ALL))
                own_answers = (formats.NONE,) * 3 if row is None else _own_cells(row)
                lines.append(
                    (
                        found.label,
                        formats.ratio(found.speedup),
                        formats.number(found.mean_accepted),
                        formats.number(found.tokens_per_s, 0),
                        *own_answers,
                    )
                )
        note = " ".join((NOTE, *self.notes))
        return self._grid(_OVERALL, lines, id="spec-bench", caption=TITLE, note=note)

    def by_family(self) -> Grid:
        """Return the table of speedups by task family. specbench's own are in brackets."""
        families = list(dict.fromkeys(t.family for t in self.results if t.family != ALL))
        found = {(t.label, t.family): t for t in self.results}
        lines = []
        for label in dict.fromkeys(t.label for t in self.results):
            cells = []
            for family in families:
                results, row = found.get((label, family)), self.rows.get((label, family))
                own_answers = formats.NONE if row is None else metrics.speedup_or_broken(row)
                cells.append(
                    f"{formats.ratio(results.speedup if results else None)} ({own_answers})"
                )
            lines.append((label, *cells))
        return self._grid(
            (Heading("method: theirs (ours)", align="l"), *map(Heading, families)), lines
        )

    def records(self) -> list[dict[str, object]]:
        """Return both results as mappings, one per method and family."""
        return [_record(results, self.rows) for results in self.results]

    def _grid(
        self, headings: Sequence[Heading], lines: Sequence[tuple[str, ...]], **more: Any
    ) -> Grid:
        """Return a table with the sections of the report, such as lossy methods."""
        known = (self.rows.get((line[0], ALL)) for line in lines)
        sections = text.sections(row for row in known if row is not None)
        return make_value_grid(headings, lines, sections=sections, **more)


def is_imported(source: RecordSource) -> bool:
    """Return True if the run consists of Spec-Bench's answer files."""
    return isinstance(source, ImportedAnswers)


def compute_spec_bench(
    run: RecordSource, sources: Sequence[RecordSource], summary: Summary
) -> SpecBench:
    """Compute the results of a report by Spec-Bench's formulas.

    Spec-Bench's formulas need the target's tokenizer. Without it, the generated tokens of the
    baseline are counted, and no answer file can be written.

    Args:
        run: A run, or several runs that are combined.
        sources: The runs that `run` consists of.
        summary: Summary of `run`.
    """
    count_tokens, decode, notes = _tokenizer(sources, Facts.from_manifest(run.manifest).target)
    run_names = getattr(run, "run_names", None)
    results: list[SpecBenchResult] = []
    runs: list[Answers] = []
    own_answers: list[Answers] = []
    for place, source in enumerate(sources):
        own = _answers(source, decode)
        labels = {label for answers in own for label in answers}
        names = {label: label for label in labels} if run_names is None else run_names[place].labels
        runs += [{names[label]: found for label, found in answers.items()} for answers in own]
        if not isinstance(source, ImportedAnswers):
            own_answers += runs[-len(own) :]
    baselines = dict.fromkeys(
        label for run in runs for label in run if label.split(" @")[0] == BASELINE
    )
    for baseline in baselines:
        results += compute_results(
            [run for run in runs if baseline in run], count_tokens, baseline=baseline
        )
    scopes = {ALL: summary.rows, **summary.families}
    rows = {(row.label, family): row for family, found in scopes.items() for row in found}
    order = {row.label: place for place, row in enumerate(summary.rows)}
    results.sort(key=lambda found: order.get(found.label, len(order)))
    return SpecBench(results, rows, own_answers, notes)


def write(found: SpecBench, folder: Path) -> list[Path]:
    """Write `spec_bench.csv`, and one answer file per method and repeat if the texts are known."""
    files = [write_csv(found.records(), folder / "spec_bench.csv", empty="method")]
    slugs = _slugs(dict.fromkeys(label for run in found.runs for label in run))
    for number, run in enumerate(found.runs, start=1):
        for label, answers in run.items():
            if all(answer.turns is not None for answer in answers):
                slug = slugs[label]
                name = slug + (f"-run_{number}" if len(found.runs) > 1 else "")
                path = folder / "spec-bench" / f"{name}.jsonl"
                files.append(write_answers(answers, slug, path))
    return files


def _slugs(labels: Iterable[str]) -> dict[str, str]:
    """Return a different file name for each label."""
    slugs = {label: re.sub(r"[^\w.+-]+", "-", label).strip("-.") for label in labels}
    count = Counter(slugs.values())
    return {
        label: slug
        if slug and count[slug] == 1 and len(slug) <= _LONGEST_SLUG
        else f"{slug[:_LONGEST_SLUG]}-{sha256(label.encode()).hexdigest()[:6]}".lstrip("-")
        for label, slug in slugs.items()
    }


def _answers(source: RecordSource, decode: Decode | None) -> list[Answers]:
    """Return a source's answers, one mapping per repeat."""
    if isinstance(source, ImportedAnswers):
        return [source.answers]
    by_pass = collect_answers(source.records(), decode)
    return [by_pass[pass_] for pass_ in sorted(by_pass)]


def _tokenizer(
    sources: Sequence[RecordSource], target: str
) -> tuple[CountTokens | None, Decode | None, list[str]]:
    """Return the token counter, the decoder, and notes on deviations from the formulas."""
    targets = {
        str(source.manifest.get("models", {}).get("target", {}).get("label"))
        for source in sources
        if not isinstance(source, ImportedAnswers)
    }
    tokenizer = load_tokenizer(next(iter(targets))) if len(targets) == 1 else None
    if tokenizer is None:
        not_written = " and answer files are not written" if targets else ""
        note = (
            f"the tokenizer of {target} is not on this machine, so the baseline's generated tokens"
            f" are counted{not_written}"
        )
        return None, None, [note]
    count_tokens: Callable[[str], int] = lambda words: len(tokenizer(words).input_ids)  # noqa: E731
    notes = []
    if not count_tokens(""):
        notes.append(
            "Spec-Bench subtracts one token for BOS, but this target's tokenizer adds none"
        )
    return count_tokens, lambda ids: decode_ids(tokenizer, ids, skip_special_tokens=True), notes


def _record(
    found: SpecBenchResult, rows: dict[tuple[str, str], MethodSummary]
) -> dict[str, object]:
    row = rows.get((found.label, found.family))
    own_answers = {
        "our_speedup": None if row is None else row.speedup,
        "our_mat": None if row is None else row.mat,
        "our_tokens_per_s": None if row is None else row.tokens_per_s,
    }
    return {**asdict(found), **own_answers}


def _own_cells(row: MethodSummary) -> tuple[str, str, str]:
    return metrics.SPEEDUP.format(row), metrics.MAT.format(row), metrics.TOKENS.format(row)

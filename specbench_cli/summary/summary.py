"""Summary of a run: all metrics of all methods, computed from the records.

Let v_i and m_i be the wall times of vanilla and of the method on the same prompt, turn and repeat,
and n_v,i and n_m,i their numbers of tokens. Then

    speedup = sum_i v_i * (n_m,i / n_v,i) / sum_i m_i

If the outputs are identical, the factor is 1, so wall times are compared. If they differ (near-tie,
sampling, lossy), the times per token are compared. The decode speedup has the same formula, with
decode times, and with the n - 1 tokens that are committed after prefill.

Both speedups have intervals and significance groups, from the same resampled questions and repeats.
Methods of another engine, such as vLLM, are compared with vanilla of that engine.

A pair with a noisy or failed output is omitted. If a method or its baseline lost more than a tenth
of its outputs, the method has no speedup. A method with wrong outputs is broken
(`judge/broken.py`), in all tables. Verdicts are counted per output (a turn of a prompt), by its
worst repeat. The proof counts questions, since the turns of a question are not independent.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import product
from typing import Any

from specbench_cli.config.run import MAX_METHODS
from specbench_cli.errors import UsageError
from specbench_cli.judge.broken import count_near_ties, find_broken_methods
from specbench_cli.stats.bootstrap import RESAMPLES
from specbench_cli.store.schema import BASELINE, LOSSLESS, Record
from specbench_cli.summary.evidence import Evidence, compare_outputs, score_difference
from specbench_cli.summary.facts import Facts
from specbench_cli.summary.metrics import MethodSummary, matches_rate
from specbench_cli.summary.outputs import MethodOutputs
from specbench_cli.summary.pairing import decode_time, process_number, total_time
from specbench_cli.summary.source import drop_details as without_bulk
from specbench_cli.summary.speedups import Speedup, compute_speedups

PEER_BASELINE = "hf:vanilla"
ALL = "all"
"""Name of the family for results over all task families."""


@dataclass(frozen=True, slots=True)
class Summary:
    """Metrics of all methods of a run.

    lossless, lossy: Metrics of each method, best first. Methods that learn across prompts come
        last. Lossless and lossy methods are never ranked together.
    families: Task family -> metrics of each method on this family, in the same order.
    prompts: Task -> number of questions.
    passes: Number of repeats.
    noise_floor: Difference between two measurements of vanilla (A/A), as a fraction. None if it was
        not measured.
    vanilla_ratio: Speed of vanilla divided by that of hf:vanilla. None if hf:vanilla was not run,
        or its times were noisy.
    """

    lossless: tuple[MethodSummary, ...]
    lossy: tuple[MethodSummary, ...]
    families: dict[str, tuple[MethodSummary, ...]]
    prompts: dict[str, int]
    passes: int
    noise_floor: float | None
    vanilla_ratio: float | None

    @property
    def rows(self) -> tuple[MethodSummary, ...]:
        """Metrics of all methods, lossless ones first."""
        return self.lossless + self.lossy

    def proof(self) -> tuple[MethodSummary, float] | None:
        """Return the method with the weakest proof, and the 95% bound on its mismatch rate.

        Only lossless methods of specbench itself count. None if no output could be checked.
        """
        bounds = [
            (row, row.mismatch_bound)
            for row in self.lossless
            if row.mismatch_bound is not None and not row.peer and row.label != BASELINE
        ]
        return max(bounds, key=lambda pair: pair[1], default=None)


def summarise(
    records: Iterable[Record], manifest: Mapping[str, Any], *, resamples: int | None = None
) -> Summary:
    """Compute the metrics of all methods of a run, over all prompts and by task family.

    Args:
        records: All records of the run, in any order. They are read once.
        manifest: Manifest of the run.
        resamples: Number of bootstrap resamples, with a fixed seed. None uses `RESAMPLES`.

    Raises:
        UsageError: There are too many methods to compare all pairs.
    """
    resamples = RESAMPLES if resamples is None else resamples
    slim = list(map(without_bulk, records))
    labels = len({record.label for record in slim})
    if labels > MAX_METHODS:
        raise UsageError(
            f"there are {labels} methods, and a table compares {MAX_METHODS} at most",
            "report fewer runs together, or run fewer methods",
        )
    broken_reasons = find_broken_methods(slim, manifest)
    rows, overall = _rows(slim, manifest, broken_reasons, resamples, with_evidence=True)
    order = {row.label: place for place, row in enumerate(rows)}
    families = dict[str, tuple[MethodSummary, ...]]()
    for family in sorted({r.family for r in slim}):
        part = [r for r in slim if r.family == family]
        own, _ = _rows(part, manifest, broken_reasons, resamples, with_evidence=False)
        families[family] = tuple(sorted(own, key=lambda row: order[row.label]))
    prompts: dict[str, set[str]] = {}
    for r in slim:
        prompts.setdefault(r.task, set()).add(r.prompt_id)
    peer = overall.get(PEER_BASELINE, Speedup()).ratio
    return Summary(
        lossless=tuple(row for row in rows if row.lossless),
        lossy=tuple(row for row in rows if not row.lossless),
        families=families,
        prompts={task: len(ids) for task, ids in prompts.items()},
        passes=len({process_number(r.pass_) for r in slim}),
        noise_floor=_noise_floor(rows, Facts.from_manifest(manifest).aa_noise),
        vanilla_ratio=None if peer is None else 1 / peer,
    )


def _rows(
    records: Sequence[Record],
    manifest: Mapping[str, Any],
    broken_reasons: Mapping[str, str],
    resamples: int,
    *,
    with_evidence: bool,
) -> tuple[list[MethodSummary], dict[str, Speedup]]:
    """Return the metrics of each method, and the speedups of all methods, including broken ones.

    The order is: lossless methods before lossy ones; specbench's engine before others; methods that
    learn across prompts last; upper bounds last; best speedup first; no speedup last.

    Args:
        broken_reasons: Label of a broken method -> what is wrong.
        with_evidence: True to compare sampled outputs with vanilla's by tests (`evidence.py`).
    """
    records_by_label: dict[str, list[Record]] = {}
    for record in records:
        records_by_label.setdefault(record.label, []).append(record)
    baseline = records_by_label.get(BASELINE, [])
    bounds = manifest.get("upper_bounds", [])
    method_facts = {row["label"]: row for row in manifest.get("rows") or ()}
    bases = {
        label: method_facts.get(label, {}).get("baseline") or BASELINE for label in records_by_label
    }
    engines = {
        base: {label: own for label, own in records_by_label.items() if bases[label] == base}
        for base in bases.values()
    }
    wall, decoding = (
        {base: compute_speedups(own, measure, resamples, base) for base, own in engines.items()}
        for measure in (total_time, decode_time)
    )
    target, draft = (_model(manifest, role) for role in ("target", "draft"))
    rows = [
        MethodSummary.from_outputs(
            MethodOutputs(
                records=own,
                wall=wall[bases[label]].by_label[label],
                decoding=decoding[bases[label]].by_label[label],
                broken_why=broken_reasons.get(label),
                ties=count_near_ties(own, manifest),
                evidence=_evidence(baseline, own, with_evidence)
                if label != BASELINE
                else Evidence(),
                upper_bound=label in bounds,
                accept_rule=method_facts.get(label, {}).get("accept"),
                state_scope=method_facts.get(label, {}).get("state_scope"),
                baseline=bases[label],
                declared_control=bool(method_facts.get(label, {}).get("control")),
                constrained=manifest.get("grammar") is not None,
            )
        )
        for label, own in records_by_label.items()
    ]
    rows.sort(
        key=lambda row: (
            not row.lossless,
            row.engine,
            row.order_matters,
            row.upper_bound,
            row.speedup is None,
            -(row.speedup or 0.0),
        )
    )
    letters, decode_letters = dict[str, str](), dict[str, str]()
    for lossless, base in product((True, False), engines):
        comparable = [r for r in rows if (r.lossless, r.baseline) == (lossless, base)]
        ranked = [r for r in comparable if not r.upper_bound]
        letters |= wall[base].group_letters([r.label for r in ranked if r.speedup is not None])
        decode_letters |= decoding[base].group_letters(
            [r.label for r in ranked if r.decode_speedup is not None]
        )
    rows = [
        replace(
            row,
            letters=letters.get(row.label, ""),
            decode_letters=decode_letters.get(row.label, ""),
            target_model=target,
            devices=_devices(manifest, method_facts.get(row.label, {})),
            **_over_random(records_by_label, rows, row),
            draft_model=draft
            if "draft" in (method_facts.get(row.label, {}).get("uses") or ())
            else None,
        )
        for row in rows
    ]
    return rows, {label: one for own in wall.values() for label, one in own.by_label.items()}


def _devices(manifest: Mapping[str, Any], method_facts: Mapping[str, Any]) -> int:
    """Return the number of devices that a method's workers used."""
    placed = (manifest.get("config", {}).get("effective", {}).get("devices") or {}).values()
    if (method_facts.get("workers") or 1) == 1 or not placed:
        return 1
    return len({"cpu" if place.startswith("cpu") else place for place in placed})


def _over_random(
    records_by_label: Mapping[str, Sequence[Record]],
    rows: Sequence[MethodSummary],
    row: MethodSummary,
) -> dict[str, Any]:
    """Return the score difference between a method and its random control, with its interval.

    The control accepts tokens at random. It is used only if it accepts about as many tokens as the
    method (`matches_rate`).
    """
    control = (o for o in rows if o.params.get("like") == row.label and matches_rate(o, row))
    found = score_difference(
        next((records_by_label[other.label] for other in control), ()), records_by_label[row.label]
    )
    ends = (None, None, None) if found is None else (found.mean, found.low, found.high)
    return dict(zip(("over_random", "over_random_low", "over_random_high"), ends, strict=True))


def _evidence(baseline: Sequence[Record], own: Sequence[Record], with_evidence: bool) -> Evidence:
    """Compare outputs with vanilla's. Lossy methods are always compared, to show lost accuracy."""
    return (
        compare_outputs(baseline, own)
        if with_evidence or own[0].guarantee not in LOSSLESS
        else Evidence()
    )


def _model(manifest: Mapping[str, Any], role: str) -> str | None:
    """Return the label of the "target" or the "draft" model. None if there is none."""
    label = ((manifest.get("models") or {}).get(role) or {}).get("label")
    return None if label is None else str(label)


def _noise_floor(rows: Iterable[MethodSummary], known: float | None) -> float | None:
    """Return the noise floor: the difference between two measurements of vanilla (A/A).

    If vanilla was run twice in this run, the noise floor is the largest distance from 1 of the
    interval of the second vanilla's speedup.

    Args:
        known: Noise floor from the manifest, used if vanilla was run once.
    """
    for row in rows:
        if row.method == BASELINE and row.label != BASELINE and row.speedup is not None:
            ends = (row.speedup, row.speedup_low, row.speedup_high)
            return max(abs(end - 1) for end in ends if end is not None)
    return known

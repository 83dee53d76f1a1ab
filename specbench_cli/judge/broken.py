"""Detection of broken methods, from the records of a run and from audits.

Tables, files, figures and exit codes all use this result. A method is broken if

- an output is neither vanilla's nor tied with it,
- it has more near-ties than rounding explains,
- the likelihood of its sampled outputs is too far from the target's distribution,
- its counters depend on earlier prompts, or
- the newest audit of its file failed.

Vanilla is broken if transformers' own module disagrees with its text.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from specbench_cli import files
from specbench_cli.errors import on_one_line
from specbench_cli.stats.martingale import LEVEL as IMPOSSIBLE
from specbench_cli.stats.martingale import bound_chance
from specbench_cli.stats.neartie import LEVEL, chance_of_any, upper_tail
from specbench_cli.store.schema import BASELINE, LOSSLESS, Record

CERTIFICATES = Path("results/certificates")
"""Folder in which reports look for audit certificates (`specbench audit --out`)."""
_MOST_BYTES = 16 * files.MB
"""Maximum size of a certificate in bytes."""

Output = tuple[str, int]
"""Prompt and turn: an output, independent of the repeat."""


@dataclass(frozen=True, slots=True)
class NearTieCounts:
    """Numbers of a method's near-ties, by output.

    found: Outputs that are near-ties in at least one repeat.
    explained: Outputs whose near-ties are all explained by batch width.
    unexplained: Outputs with a near-tie that width does not explain, where this was checked.
    expected: Expected number of near-ties from rounding (upper bound). None if vanilla's gaps were
        not measured. The same holds for both probabilities.
    p: Probability (upper bound) of at least `found` near-ties.
    unexplained_p: Probability (upper bound) of at least `unexplained` ones.

    A forward as wide as the method's is at least as similar to the method's as to vanilla's. If the
    two differ by rounding, it agrees with vanilla in at most half of the cases. So the probability
    of an unexplained near-tie is half that of a near-tie.
    """

    found: int
    explained: int
    expected: float | None
    p: float | None
    unexplained: int = 0
    unexplained_p: float | None = None

    @property
    def excess_message(self) -> str | None:
        """The near-ties that rounding cannot explain, with their probability; None if it can."""
        if self.p is None or self.expected is None or self.unexplained_p is None:
            return None
        if self.p < LEVEL:
            return (
                f"{self.found} near-ties where rounding makes {self.expected:.2g} at most"
                f" (p {self.p:.1g})"
            )
        if self.unexplained_p < LEVEL:
            return (
                f"{self.unexplained} near-ties that the width of verification does not explain"
                f" where rounding makes {self.expected / 2:.2g} at most"
                f" (p {self.unexplained_p:.1g})"
            )
        return None


def compute_likelihood_deviation(records_of_method: Iterable[Record]) -> tuple[float, float] | None:
    """Compare the likelihood of sampled outputs with its expectation under the target's
    distribution.

    Returns:
        The deviation in standard deviations, and an upper bound of its probability
        (`stats.martingale`). None if nothing was sampled, or if every token was certain.
    """
    found = [
        r.likelihood for r in records_of_method if r.likelihood is not None and r.error is None
    ]
    variance = sum(each.variance for each in found)
    if variance <= 0.0:
        return None
    excess = sum(each.excess for each in found)
    cumulants = [sum(column) for column in zip(*(each.cumulants for each in found), strict=True)]
    return excess / variance**0.5, bound_chance(excess, cumulants)


def count_near_ties(
    records_of_method: Iterable[Record], manifest: Mapping[str, Any]
) -> NearTieCounts:
    """Count a method's near-ties and compare them with vanilla's gaps."""
    passes: dict[Output, int] = {}
    tied: dict[Output, bool] = {}
    unexplained: set[Output] = set()
    for record in records_of_method:
        verdict, at = record.verdict, (record.prompt_id, record.turn)
        if verdict is None or verdict.kind not in ("identical", "near-tie", "mismatch"):
            continue
        passes[at] = passes.get(at, 0) + 1
        if verdict.kind == "near-tie":
            tied[at] = tied.get(at, True) and bool(verdict.rounding)
            if verdict.rounding is False:
                unexplained.add(at)
    explained = sum(tied.values())
    measured = manifest.get("near_ties")
    if measured is None or not passes:
        return NearTieCounts(len(tied), explained, None, None, len(unexplained))
    by_output = {(prompt_id, turn): chance for prompt_id, turn, chance in measured["chances"]}
    # Each repeat counts as another chance. If repeats are equal, this is lenient, never too strict.
    chances, halved = (
        [
            c
            for at, n in passes.items()
            if (c := chance_of_any([share * by_output.get(at, 0.0)] * n))
        ]
        for share in (1.0, 0.5)
    )
    ps = upper_tail(len(tied), chances), upper_tail(len(unexplained), halved)
    return NearTieCounts(len(tied), explained, sum(chances), ps[0], len(unexplained), ps[1])


def find_broken_methods(
    records: Iterable[Record],
    manifest: Mapping[str, Any],
    failed_audit: Callable[[str, str], str | None] | None = None,
) -> dict[str, str]:
    """Return the reasons why methods are broken, by label. Methods that are not broken are left
    out.

    Args:
        records: All records of a run.
        manifest: Manifest of the run.
        failed_audit: Returns the failure of the newest audit for a method and the hash of its file.
            Default: `find_failed_audit`.
    """
    records_of_method: dict[str, list[Record]] = {}
    for record in records:
        records_of_method.setdefault(record.label, []).append(record)
    look_up = failed_audit or find_failed_audit
    reasons = {
        label: _find_reason(own, manifest, look_up) for label, own in records_of_method.items()
    }
    return {label: why for label, why in reasons.items() if why is not None}


_REFUTING = ("BROKEN", "MISDECLARED", "FAULTY", "NOT SHOWN")


def find_failed_audit(method: str, file_sha256: str, folder: Path | None = None) -> str | None:
    """Return the failure that the newest certificate of a method's file states, or None.

    A certificate fails if it refutes the guarantee or a declaration, or if it had too few cases.
    """
    own = [c for c in find_certificates(method, folder) if c.get("sha256") == file_sha256]
    if not own or own[-1].get("verdict") not in _REFUTING:
        return None
    return f"its audit says {own[-1]['verdict']}: specbench audit {method}"


def find_certificates(method: str, folder: Path | None = None) -> list[Mapping[str, Any]]:
    """Return the certificates of a method in a folder, newest last."""
    found: list[tuple[float, Mapping[str, Any]]] = []
    for file in sorted((folder or CERTIFICATES).glob("*.json")):
        try:
            facts = json.loads(files.read_text(file, _MOST_BYTES))
            written = file.stat().st_mtime
        except (OSError, ValueError):
            continue  # another program's file, or an incomplete one
        if isinstance(facts, dict) and facts.get("method") == method:
            found.append((written, facts))
    return [facts for _, facts in sorted(found, key=lambda pair: pair[0])]


def _find_reason(
    records_of_method: list[Record],
    manifest: Mapping[str, Any],
    failed_audit: Callable[[str, str], str | None],
) -> str | None:
    first = records_of_method[0]
    wrong = {
        (r.prompt_id, r.turn)
        for r in records_of_method
        if r.verdict and r.verdict.kind == "mismatch"
    }
    if wrong:
        outputs = "output is" if len(wrong) == 1 else "outputs are"
        if first.label == BASELINE:
            what = "not what transformers' own module says of the text"
        elif first.log_likelihood is not None:
            what = "nothing that the target can say"
        else:
            what = "neither vanilla's nor tied with it"
        return f"{len(wrong)} {outputs} {what}, first {min(wrong)[0]}"
    if (prompt := (manifest.get("leaks") or {}).get(first.label)) is not None:
        return (
            f"its state outlives a prompt: {on_one_line(prompt)}, decoded again at the end, came"
            " out otherwise"
        )
    if (
        first.guarantee in LOSSLESS
        and (found := compute_likelihood_deviation(records_of_method)) is not None
    ):
        deviations, p = found
        if p < IMPOSSIBLE:
            return (
                f"the likelihood of its outputs is {deviations:+.1f} standard deviations from what"
                f" the target's distribution makes it (p {p:.1g} at most)"
            )
    if (ties := count_near_ties(records_of_method, manifest).excess_message) is not None:
        return ties
    files = {**(manifest.get("method_files") or {}), **(manifest.get("row_files") or {})}
    file_sha256 = files.get(first.label, files.get(first.method))
    if first.peer or file_sha256 is None or first.guarantee not in LOSSLESS:
        return None
    return failed_audit(first.method, file_sha256)

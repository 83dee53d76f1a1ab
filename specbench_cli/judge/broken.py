"""Detection of broken methods, from the records of a run and from audits.

Tables, files, figures and exit codes show which methods are broken. Vanilla is plain decoding
without a draft. A near-tie is an output that differs from vanilla's output only because two tokens
have almost equal scores. A method is broken if one of these statements is true:

- One of its outputs is neither vanilla's output nor a near-tie.
- It has more near-ties than rounding explains.
- The likelihood of its sampled outputs is too far from the likelihood that the target's
  distribution predicts.
- It decoded the first prompt again at the end of the run, and the result was different.
- The newest audit of its source file failed.

Vanilla itself is broken if its output contradicts the transformers model of the target.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from specbench_cli import files
from specbench_cli.errors import to_one_line
from specbench_cli.stats.martingale import LEVEL as IMPOSSIBLE
from specbench_cli.stats.martingale import bound_chance
from specbench_cli.stats.neartie import LEVEL, chance_of_any, upper_tail
from specbench_cli.store.schema import BASELINE, LOSSLESS, Record

CERTIFICATES = Path("results/certificates")
"""Folder of the audit certificates that reports read (`specbench audit --out`)."""
_MAX_BYTES = 16 * files.MB
"""Maximum size of a certificate in bytes."""

Output = tuple[str, int]
"""Prompt id and turn of an output. All repeats of a run decode the same outputs."""


@dataclass(frozen=True, slots=True)
class NearTieCounts:
    """Counts of a method's near-ties, and their probabilities if rounding is the only cause.

    A near-tie is an output that differs from vanilla's output because two tokens have almost equal
    scores. Width is the number of tokens in one forward. It changes the rounding (`judge.neartie`).

    found: Number of outputs that are a near-tie in at least one repeat.
    explained: Number of outputs whose near-ties are all explained by the width.
    unexplained: Number of outputs with a near-tie that the width does not explain. Outputs without
        a check of the width do not count.
    expected: Upper bound of the number of near-ties that rounding is expected to cause.
    p: Upper bound of the probability of at least `found` near-ties.
    unexplained_p: Upper bound of the probability of at least `unexplained` unexplained near-ties.

    `expected`, `p` and `unexplained_p` are None if the run did not compute where near-ties are
    possible.

    An unexplained near-tie is at most half as probable as a near-tie. The check decodes again with
    forwards as wide as the method's forwards. If only rounding made the output different, this
    check generates the method's output at least half of the time.
    """

    found: int
    explained: int
    expected: float | None
    p: float | None
    unexplained: int = 0
    unexplained_p: float | None = None

    @property
    def excess_message(self) -> str | None:
        """Message for the user if rounding cannot explain the number of near-ties, else None."""
        if self.p is None or self.expected is None or self.unexplained_p is None:
            return None
        if self.p < LEVEL:
            return (
                f"{self.found} near-ties, where rounding explains at most {self.expected:.2g}"
                f" (p {self.p:.1g})"
            )
        if self.unexplained_p < LEVEL:
            return (
                f"{self.unexplained} near-ties that the width of verification does not explain,"
                f" where rounding explains at most {self.expected / 2:.2g}"
                f" (p {self.unexplained_p:.1g})"
            )
        return None


def compute_likelihood_deviation(records_of_method: Iterable[Record]) -> tuple[float, float] | None:
    """Return how far the likelihood of a method's sampled outputs is from its expected value.

    The expected value follows from the target's distribution.

    Returns:
        The distance in standard deviations, and an upper bound of the probability of such a
        distance (`stats.martingale`). None if no output was sampled, or if every token had
        probability 1.
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
    """Count a method's near-ties.

    Also compute the probability of this count if rounding is the only cause of near-ties.

    Args:
        records_of_method: The records of one method.
        manifest: Manifest of the run. Its entry `near_ties` has the probability of a near-tie for
            each output of vanilla.
    """
    repeats: dict[Output, int] = {}
    tied: dict[Output, bool] = {}
    unexplained: set[Output] = set()
    for record in records_of_method:
        verdict, at = record.verdict, (record.prompt_id, record.turn)
        if verdict is None or verdict.kind not in ("identical", "near-tie", "mismatch"):
            continue
        repeats[at] = repeats.get(at, 0) + 1
        if verdict.kind == "near-tie":
            tied[at] = tied.get(at, True) and bool(verdict.rounding)
            if verdict.rounding is False:
                unexplained.add(at)
    explained = sum(tied.values())
    measured = manifest.get("near_ties")
    if measured is None or not repeats:
        return NearTieCounts(len(tied), explained, None, None, len(unexplained))
    by_output = {(prompt_id, turn): chance for prompt_id, turn, chance in measured["chances"]}
    # Repeats may have equal outputs, but count each repeat as an independent chance of a near-tie.
    # This can only raise the expected number, so a correct method is still not called broken.
    chances, halved = (
        [
            c
            for at, n in repeats.items()
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
    """Return the broken methods of a run: label -> reason.

    Args:
        records: All records of a run.
        manifest: Manifest of the run.
        failed_audit: Function that returns the failure of the newest audit, or None. Its arguments
            are the name of a method and the SHA-256 of its file. Default: `find_failed_audit`.
    """
    records_of_method: dict[str, list[Record]] = {}
    for record in records:
        records_of_method.setdefault(record.label, []).append(record)
    look_up = failed_audit or find_failed_audit
    reasons = {
        label: _find_reason(own, manifest, look_up) for label, own in records_of_method.items()
    }
    return {label: why for label, why in reasons.items() if why is not None}


_FAILED_VERDICTS = ("BROKEN", "MISDECLARED", "FAULTY", "NOT SHOWN")


def find_failed_audit(method: str, file_sha256: str, folder: Path | None = None) -> str | None:
    """Return the failure in the newest audit certificate of a method's source file, or None.

    An audit fails if it disproves the guarantee or another property that the method declares. It
    also fails if it found too few test cases.
    """
    own = [c for c in find_certificates(method, folder) if c.get("sha256") == file_sha256]
    if not own or own[-1].get("verdict") not in _FAILED_VERDICTS:
        return None
    return f"its audit says {own[-1]['verdict']}: specbench audit {method}"


def find_certificates(method: str, folder: Path | None = None) -> list[Mapping[str, Any]]:
    """Return the audit certificates of a method in a folder, from the oldest to the newest."""
    found: list[tuple[float, Mapping[str, Any]]] = []
    for file in sorted((folder or CERTIFICATES).glob("*.json")):
        try:
            facts = json.loads(files.read_text(file, _MAX_BYTES))
            written = file.stat().st_mtime
        except (OSError, ValueError):
            continue  # the file is incomplete, or another program wrote it
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
            what = "not what the transformers model of the target generates"
        elif first.log_likelihood is not None:
            what = "impossible under the target's distribution"
        else:
            what = "neither vanilla's nor tied with it"
        return f"{len(wrong)} {outputs} {what}, first {min(wrong)[0]}"
    if (prompt := (manifest.get("leaks") or {}).get(first.label)) is not None:
        return (
            f"it keeps state from other prompts: {to_one_line(prompt)}, decoded again at the end"
            " of the run, gave a different result"
        )
    if (
        first.guarantee in LOSSLESS
        and (found := compute_likelihood_deviation(records_of_method)) is not None
    ):
        deviations, p = found
        if p < IMPOSSIBLE:
            return (
                f"the likelihood of its outputs is {deviations:+.1f} standard deviations from its"
                f" expected value under the target's distribution (p {p:.1g} at most)"
            )
    if (ties := count_near_ties(records_of_method, manifest).excess_message) is not None:
        return ties
    files = {**(manifest.get("method_files") or {}), **(manifest.get("row_files") or {})}
    file_sha256 = files.get(first.label, files.get(first.method))
    if first.peer or file_sha256 is None or first.guarantee not in LOSSLESS:
        return None
    return failed_audit(first.method, file_sha256)

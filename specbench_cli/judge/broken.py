"""Which rows are BROKEN: claimed more than was found, by what a run recorded and by audits.

One answer for tables, files, figures and exit codes. A row is broken by an output that is neither
vanilla's nor tied with it, by more near-ties than rounding makes, by drawn outputs that the target
makes less or more likely than chance allows, by counters that depend on the prompts before, and by
a failed audit of the method's very file. Vanilla is broken where transformers' own module, asked
about its text, says otherwise.
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
"""Where reports look for the certificates of audits (`specbench audit --out`)."""
_MOST_BYTES = 16 * files.MB
"""Bytes of a certificate."""

Output = tuple[str, int]
"""An output whichever pass it is of: prompt and turn."""


@dataclass(frozen=True, slots=True)
class NearTies:
    """A row's near-ties, by output.

    found: outputs that are near-ties in some pass. explained: those that width explains wherever
    they are; unexplained: those that it does not, where that was asked. expected: how many rounding
    makes at most, on average. p: the chance of at least as many as were found, at most, and
    unexplained_p of those that width does not explain. Null where vanilla's gaps were not measured.

    A forward as wide as the method's is as like the method's as like vanilla's, or more. So where
    those two part by rounding, it sides with vanilla no more than half the time: the chance of a
    near-tie that width does not explain is half that of a near-tie.
    """

    found: int
    explained: int
    expected: float | None
    p: float | None
    unexplained: int = 0
    unexplained_p: float | None = None

    @property
    def too_many(self) -> str | None:
        """Which of them rounding does not make, and how unlikely; None where it may."""
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


def surprise(cells: Iterable[Record]) -> tuple[float, float] | None:
    """How many standard deviations the likelihood of a row's drawn outputs lies from what the
    target's distribution gives to be expected, and the chance of that, at most
    (`stats.martingale`); None where nothing was drawn, or where every token was certain."""
    found = [r.likelihood for r in cells if r.likelihood is not None and r.error is None]
    variance = sum(each.variance for each in found)
    if variance <= 0.0:
        return None
    excess = sum(each.excess for each in found)
    cumulants = [sum(column) for column in zip(*(each.cumulants for each in found), strict=True)]
    return excess / variance**0.5, bound_chance(excess, cumulants)


def near_ties(cells: Iterable[Record], manifest: Mapping[str, Any]) -> NearTies:
    """Count a row's near-ties and compare them with vanilla's gaps."""
    passes: dict[Output, int] = {}
    tied: dict[Output, bool] = {}
    asked: set[Output] = set()
    for record in cells:
        verdict, at = record.verdict, (record.prompt_id, record.turn)
        if verdict is None or verdict.kind not in ("identical", "near-tie", "mismatch"):
            continue
        passes[at] = passes.get(at, 0) + 1
        if verdict.kind == "near-tie":
            tied[at] = tied.get(at, True) and bool(verdict.rounding)
            if verdict.rounding is False:
                asked.add(at)
    explained = sum(tied.values())
    measured = manifest.get("near_ties")
    if measured is None or not passes:
        return NearTies(len(tied), explained, None, None, len(asked))
    by_output = {(prompt_id, turn): chance for prompt_id, turn, chance in measured["chances"]}
    # Every pass is another chance: if all passes are alike that is too generous, never too strict.
    chances, halved = (
        [
            c
            for at, n in passes.items()
            if (c := chance_of_any([share * by_output.get(at, 0.0)] * n))
        ]
        for share in (1.0, 0.5)
    )
    ps = upper_tail(len(tied), chances), upper_tail(len(asked), halved)
    return NearTies(len(tied), explained, sum(chances), ps[0], len(asked), ps[1])


def broken(
    records: Iterable[Record],
    manifest: Mapping[str, Any],
    failed_audit: Callable[[str, str], str | None] | None = None,
) -> dict[str, str]:
    """Why rows are broken, by label; a row that stands is not in it.

    Args:
        records: all of a run's.
        manifest: the run's.
        failed_audit: tells of a method and its file's hash what its newest audit found wrong;
            default: `failed_certificate`.
    """
    cells: dict[str, list[Record]] = {}
    for record in records:
        cells.setdefault(record.label, []).append(record)
    look_up = failed_audit or failed_certificate
    whys = {label: _why(own, manifest, look_up) for label, own in cells.items()}
    return {label: why for label, why in whys.items() if why is not None}


_REFUTING = ("BROKEN", "MISDECLARED", "FAULTY", "NOT SHOWN")


def failed_certificate(method: str, file_sha256: str, folder: Path | None = None) -> str | None:
    """What the newest certificate of a method's file says if it refutes the method's claim, or that
    the method does what it says it does, or could see nothing of either; None if it does none of
    that, or if there is none."""
    own = [c for c in certificates(method, folder) if c.get("sha256") == file_sha256]
    if not own or own[-1].get("verdict") not in _REFUTING:
        return None
    return f"its audit says {own[-1]['verdict']}: specbench audit {method}"


def certificates(method: str, folder: Path | None = None) -> list[Mapping[str, Any]]:
    """A method's certificates in a folder, the newest last, whatever version of its file they are
    of."""
    found: list[tuple[float, Mapping[str, Any]]] = []
    for file in sorted((folder or CERTIFICATES).glob("*.json")):
        try:
            facts = json.loads(files.read_text(file, _MOST_BYTES))
            written = file.stat().st_mtime
        except (OSError, ValueError):
            continue  # somebody else's file, or half of one: no certificate
        if isinstance(facts, dict) and facts.get("method") == method:
            found.append((written, facts))
    return [facts for _, facts in sorted(found, key=lambda pair: pair[0])]


def _why(
    cells: list[Record],
    manifest: Mapping[str, Any],
    failed_audit: Callable[[str, str], str | None],
) -> str | None:
    first = cells[0]
    wrong = {(r.prompt_id, r.turn) for r in cells if r.verdict and r.verdict.kind == "mismatch"}
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
    if first.guarantee in LOSSLESS and (found := surprise(cells)) is not None:
        deviations, p = found
        if p < IMPOSSIBLE:
            return (
                f"the likelihood of its outputs is {deviations:+.1f} standard deviations from what"
                f" the target's distribution makes it (p {p:.1g} at most)"
            )
    if (ties := near_ties(cells, manifest).too_many) is not None:
        return ties
    files = {**(manifest.get("method_files") or {}), **(manifest.get("row_files") or {})}
    file_sha256 = files.get(first.label, files.get(first.method))
    if first.peer or file_sha256 is None or first.guarantee not in LOSSLESS:
        return None
    return failed_audit(first.method, file_sha256)

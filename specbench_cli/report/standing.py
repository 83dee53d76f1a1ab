"""Which rows are BROKEN: claimed more than was found, by what a run recorded and by audits.

One answer for tables, files, figures and exit codes. A row is broken by an output that is neither
vanilla's nor tied with it, by more near-ties than rounding makes, and by a failed audit of the
method's very file.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from specbench_cli.stats.neartie import LEVEL, at_least_one, upper_tail
from specbench_cli.store.schema import LOSSLESS, Record

CERTIFICATES = Path("results/certificates")
"""Where reports look for the certificates of audits (`specbench audit --out`)."""

Output = tuple[str, int]
"""An output whichever pass it is of: prompt and turn."""


@dataclass(frozen=True, slots=True)
class NearTies:
    """A row's near-ties, by output.

    found: outputs that are near-ties in some pass. explained: those that width explains wherever
    they are. expected: how many rounding makes at most, on average; p: the chance of at least as
    many as were found, at most. Both null where vanilla's gaps were not measured.
    """

    found: int
    explained: int
    expected: float | None
    p: float | None

    @property
    def too_many(self) -> bool:
        """Whether rounding is no explanation."""
        return self.p is not None and self.p < LEVEL


def near_ties(cells: Iterable[Record], manifest: Mapping[str, Any]) -> NearTies:
    """Count a row's near-ties and compare them with vanilla's gaps."""
    passes: dict[Output, int] = {}
    tied: dict[Output, bool] = {}
    for record in cells:
        verdict, at = record.verdict, (record.prompt_id, record.turn)
        if verdict is None or verdict.kind not in ("identical", "near-tie", "mismatch"):
            continue
        passes[at] = passes.get(at, 0) + 1
        if verdict.kind == "near-tie":
            tied[at] = tied.get(at, True) and bool(verdict.rounding)
    measured = manifest.get("near_ties")
    if measured is None or not passes:
        return NearTies(len(tied), sum(tied.values()), None, None)
    by_output = {(prompt_id, turn): chance for prompt_id, turn, chance in measured["chances"]}
    # Every pass is another chance: if all passes are alike that is too generous, never too strict.
    chances = [at_least_one([by_output.get(at, 0.0)] * n) for at, n in passes.items()]
    p = upper_tail(len(tied), [chance for chance in chances if chance])
    return NearTies(len(tied), sum(tied.values()), sum(chances), p)


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


def failed_certificate(method: str, file_sha256: str, folder: Path | None = None) -> str | None:
    """What the newest certificate of a method's file says if it refutes the method's claim; None if
    it does not, or if there is none. Outputs that are right break no row, whatever else is wrong.
    """
    own = [c for c in certificates(method, folder) if c.get("sha256") == file_sha256]
    if not own or own[-1].get("verdict") != "BROKEN":
        return None
    return f"its audit says so: specbench audit {method}"


def certificates(method: str, folder: Path | None = None) -> list[Mapping[str, Any]]:
    """A method's certificates in a folder, the newest last, whatever version of its file they are
    of."""
    found: list[tuple[float, Mapping[str, Any]]] = []
    for file in sorted((folder or CERTIFICATES).glob("*.json")):
        try:
            facts = json.loads(file.read_text(encoding="utf-8"))
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
        return f"{len(wrong)} {outputs} neither vanilla's nor tied with it, first {min(wrong)[0]}"
    ties = near_ties(cells, manifest)
    if ties.too_many:
        return (
            f"{ties.found} near-ties where rounding makes {ties.expected:.2g} at most"
            f" (p {ties.p:.1g})"
        )
    files = {**(manifest.get("method_files") or {}), **(manifest.get("row_files") or {})}
    file_sha256 = files.get(first.label, files.get(first.method))
    if first.peer or file_sha256 is None or first.guarantee not in LOSSLESS:
        return None
    return failed_audit(first.method, file_sha256)

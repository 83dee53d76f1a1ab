"""Certificates of `specbench audit` as tables on a terminal."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

from specbench_cli import output

if TYPE_CHECKING:
    from specbench_cli.audit.certificate import Certificate


def print_certificates(certificates: Sequence[Certificate]) -> None:
    """Print the checks of one method, or a table of several methods and their findings."""
    if len(certificates) == 1:
        output.rows(_checks(certificates[0]))
        output.data(f"\n{certificates[0].method}: {certificates[0].verdict}")
    else:
        output.rows([_row(certificate) for certificate in certificates])
    for certificate in certificates:
        for finding in certificate.findings:
            if finding.problem is not None:
                output.data(
                    f"\n{certificate.method}: {certificate.verdict} by {finding.check}\n"
                    f"{finding.problem}"
                )


def _row(certificate: Certificate) -> dict[str, Any]:
    """Return the table row of a method."""
    found = {finding.check: finding for finding in certificate.findings}

    def figure(check: str, name: str) -> float | None:
        return found[check].figure.get(name) if check in found else None

    failed = [finding.check for finding in certificate.findings if not finding.passed]
    return {
        "method": certificate.method,
        "verdict": certificate.verdict,
        "distribution off by": _small(figure("distribution", "total_variation")),
        "outcomes": figure("distribution", "outcomes"),
        "outputs": sum(
            int(f.figure.get("outputs", 0)) for f in certificate.findings if f.checks_guarantee
        ),
        "steps": figure("counters", "steps"),
        "failed": failed,
        "seconds": round(certificate.seconds, 1),
    }


def _checks(certificate: Certificate) -> list[dict[str, Any]]:
    """Return a table row for each check."""
    return [
        {
            "check": finding.check,
            "result": "passed" if finding.passed else "FAILED" if finding.shown else "NOT SHOWN",
            "figures": ", ".join(
                f"{name.replace('_', ' ')} {_small(value)}"
                for name, value in finding.figure.items()
            ),
            "seconds": round(finding.seconds, 1),
        }
        for finding in certificate.findings
    ]


def _small(value: float | None) -> str | None:
    """Format a number with two significant digits. Whole numbers are not rounded."""
    if value is None:
        return None
    return f"{value:,}" if isinstance(value, int) else f"{value:.2g}"

"""`specbench audit`: whether methods keep what they promise, proved on small models."""

from __future__ import annotations

import time
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from specbench_cli import files, output, registry
from specbench_cli.commands import OUTPUT, OVERWRITE
from specbench_cli.config import plugin_file
from specbench_cli.errors import ExitCode, UsageError

if TYPE_CHECKING:
    from specbench_cli.audit.certificate import Certificate

EXAMPLES = (
    "specbench audit sps",
    "specbench audit --all",
    "specbench audit --all --resume",
    "specbench audit --plugin my_method.py",
    "specbench audit sps pld --json --out certificates",
)
EPILOG = "\n\n".join(
    (
        "Examples:",
        *EXAMPLES,
        "PASSED: everything held. BROKEN: the output is not what the method's guarantee says."
        " MISDECLARED: its class declares what its code does not do. FAULTY: outputs are right, but"
        " states, counts or speed are not. All three end with exit code 1.",
    )
)


AUDITED = "What to audit"


def audit(
    methods: Annotated[
        list[str] | None,
        typer.Argument(metavar="METHOD", help="Methods.", show_default=False),
    ] = None,
    every: Annotated[
        bool, typer.Option("--all", help="Every registered method.", rich_help_panel=AUDITED)
    ] = False,
    plugin: Annotated[
        list[str] | None,
        typer.Option(
            metavar="FILE",
            help="Python file with methods; alone, all of them.",
            rich_help_panel=AUDITED,
        ),
    ] = None,
    out: Annotated[
        Path | None,
        typer.Option(
            "--out",
            "-o",
            metavar="DIR",
            help="Where each certificate goes as JSON; reports look into the default.",
            show_default="results/certificates",
            rich_help_panel=OUTPUT,
        ),
    ] = None,
    resume: Annotated[
        bool,
        typer.Option(
            "--resume",
            help="Keep the certificates in --out that were made with the same code; audit the other"
            " methods.",
            rich_help_panel=AUDITED,
        ),
    ] = False,
    overwrite: Annotated[
        bool, typer.Option("--overwrite", help=OVERWRITE, rich_help_panel=OUTPUT)
    ] = False,
    json: Annotated[
        bool, typer.Option("--json", help="Certificates as JSON lines.", rich_help_panel=OUTPUT)
    ] = False,
) -> ExitCode:
    """Prove on small models that a method keeps what it promises.

    On models that are tables every outcome of a method's chance is walked: the law of its output
    is exact, not estimated. Greedy and coupled outputs, caches, counters and bounds of acceptance
    are checked there and on a tiny Llama.
    """
    names = _names(methods or [], every, plugin or [])
    from specbench_cli.audit.audit import audit_all
    from specbench_cli.judge.broken import CERTIFICATES

    folder = out or CERTIFICATES
    done = _reusable(names, folder) if resume else []
    kept = {certificate.method for certificate in done}
    due = [name for name in names if name not in kept]
    for name in due:
        files.check_listed(_file(folder, name), overwrite=overwrite)
    if done:
        output.note(f"{len(done)} of {len(names)} certificates in {folder} are kept")
    for certificate in done if json else ():
        output.json_line(certificate.facts())
    start = time.monotonic()
    for n, certificate in enumerate(audit_all(due, plugin or []), start=1):
        done.append(certificate)
        _write(certificate, folder, overwrite)
        left = (time.monotonic() - start) / n * (len(due) - n)
        progress = (
            f" ({len(done)} of {len(names)}, about {_duration(left)} left)" if n < len(due) else ""
        )
        if json:
            output.json_line(certificate.facts())
        else:
            output.note(
                f"{certificate.method}: {certificate.verdict} in {certificate.seconds:.1f} s"
                f"{progress}"
            )
    if not json:
        _show(sorted(done, key=lambda certificate: names.index(certificate.method)))
    return ExitCode.OK if all(c.passed for c in done) else ExitCode.BAD_ANSWER


def _names(methods: list[str], every: bool, plugins: list[str]) -> list[str]:
    """The methods asked for, by canonical name, each once."""
    for file in plugins:
        if Path(file).is_file():
            plugin_file.hold(file)  # for the processes that audit
    plugged = [name for file in plugins for name in registry.load_plugin(file)]
    known = registry.entries()
    own = [name for name, entry in known.items() if entry.baseline == "vanilla"]
    if every:
        if methods:
            raise UsageError("--all audits every method; drop the names", "specbench audit --all")
        return own
    words = [word for given in methods for word in given.split(",") if word.strip()]
    names = [registry.resolve(word) for word in words] or plugged
    if not names:
        raise UsageError("no method to audit", "specbench audit METHOD, --all or --plugin FILE")
    if elsewhere := [name for name in names if name not in own]:
        raise UsageError(
            f"{', '.join(elsewhere)} decodes by another engine, which has none of the small models",
            "specbench run: every output of it is held against vanilla's",
        )
    return list(dict.fromkeys(names))


def _reusable(names: list[str], folder: Path) -> list[Certificate]:
    """Return the certificates in a folder whose method and code are unchanged."""
    from specbench_cli.audit.certificate import reusable_certificate

    found = (reusable_certificate(_file(folder, name), registry.load(name)) for name in names)
    return [certificate for certificate in found if certificate is not None]


def _duration(seconds: float) -> str:
    return f"{seconds / 60:.0f} min" if seconds >= 90 else f"{seconds:.0f} s"


def _file(folder: Path, method: str) -> Path:
    """Return the path of a method's certificate."""
    return folder / f"{method.replace(':', '-')}.json"


def _write(certificate: Certificate, folder: Path, overwrite: bool) -> None:
    import json

    try:
        text = json.dumps(certificate.facts(), indent=2) + "\n"
        files.write_listed(_file(folder, certificate.method), text, overwrite=overwrite)
    except OSError as error:
        raise UsageError(f"cannot write to {folder}: {error.strerror}") from error


def _show(certificates: list[Certificate]) -> None:
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
    """A method in a line."""
    found = {finding.check: finding for finding in certificate.findings}

    def figure(check: str, name: str) -> float | None:
        return found[check].figure.get(name) if check in found else None

    failed = [finding.check for finding in certificate.findings if not finding.passed]
    return {
        "method": certificate.method,
        "verdict": certificate.verdict,
        "law off by": _small(figure("law", "total_variation")),
        "outcomes": figure("law", "outcomes"),
        "outputs": sum(int(f.figure.get("outputs", 0)) for f in certificate.findings if f.is_claim),
        "steps": figure("counters", "steps"),
        "failed": failed,
        "seconds": round(certificate.seconds, 1),
    }


def _checks(certificate: Certificate) -> list[dict[str, Any]]:
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
    if value is None:
        return None
    return f"{value:,}" if isinstance(value, int) else f"{value:.2g}"

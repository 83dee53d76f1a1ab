"""Facts about a method, for `specbench list methods` and for docs/reference/methods.md.

The facts are the method's guarantee, parameters and audit results, and the speedups that its papers
claim.
"""

from __future__ import annotations

import inspect
from hashlib import sha256
from pathlib import Path
from types import NoneType, UnionType
from typing import TYPE_CHECKING, Any, Literal, Union, get_args, get_origin

from specbench_cli import registry
from specbench_cli.config import plugin_file

if TYPE_CHECKING:
    from specbench_cli.engine.method import Method


def describe_entry(name: str) -> dict[str, Any]:
    """Return the registry's facts about a method, without importing it."""
    entry = registry.entries()[name]
    return {
        "name": name,
        "aliases": entry.aliases,
        "guarantee": entry.guarantee,
        "needs": entry.needs,
        "peer": entry.peer,
        "source": entry.source,
        "origin": entry.origin,
        "summary": entry.summary,
    }


def describe_method(name: str) -> dict[str, Any]:
    """Return all facts about a method, which is imported for this."""
    canonical = registry.resolve(name)
    method = registry.load(canonical)
    build, papers = method(), registry.papers(canonical)
    parameters = [
        {
            "parameter": f"{canonical}.{key}",
            "default": field.default,
            "type": _format_type(field.annotation),
            "description": field.description,
        }
        for key, field in method.Params.model_fields.items()
    ]
    claims = [
        {
            "claimed speedup": claim.speedup,
            "models": claim.models,
            "task": claim.task,
            "temperature": claim.temperature,
            "hardware": claim.hardware,
            "read in": claim.source,
        }
        for claim in papers.claims
    ]
    return {
        **describe_entry(canonical),
        "guarantee": {
            rule: build.guarantee(rule) for rule in ("greedy", "rejection", "block", "coupled")
        },
        "state_scope": method.state_scope,
        "timing_free": build.timing_free,
        "workers": method.workers,
        "audit": audit_status(canonical, method),
        "parameters": parameters,
        "claims": claims,
        "about": inspect.getdoc(method) or "",
        "citation": papers.citation,
    }


def audit_status(name: str, method: type[Method], folder: Path | None = None) -> str:
    """Return the result of the last audit of a method, as text.

    The text is different if the method was never audited, or if its code changed since its audit.

    Args:
        folder: Folder with the certificates that `specbench audit` wrote. None means the default
            folder.
    """
    from specbench_cli.judge.broken import find_certificates

    found = find_certificates(name, folder)
    if not found:
        return f"not audited here: specbench audit {name}"
    own = sha256(plugin_file.content(inspect.getfile(method))).hexdigest()
    same = [certificate for certificate in found if certificate.get("sha256") == own]
    if not same:
        verdict = found[-1].get("verdict")
        return f"stale: {verdict}, but its file has changed since: specbench audit {name}"
    checks = same[-1].get("checks", [])
    return f"{same[-1].get('verdict')}: {len(checks)} checks of the current file"


def catalogue_row(facts: dict[str, Any]) -> dict[str, str]:
    """Return the table row of a method in docs/reference/methods.md, as Markdown."""
    row = {
        "method": f"`{facts['name']}`",
        "other names": ", ".join(f"`{alias}`" for alias in facts["aliases"]),
        "needs": ", ".join(facts["needs"]),
        "idea": facts["summary"].rstrip("."),
        "source": facts["source"],
    }
    if facts["name"] in registry.built_in_methods():
        return row
    from specbench_cli.report.markdown_table import inline

    return row | {key: inline(row[key]) for key in ("needs", "idea", "source")}


def family_rows() -> list[dict[str, str]]:
    """Return the rows of a table of method families. Lossless and lossy methods have separate
    rows.
    """
    groups: dict[tuple[str, bool], list[str]] = {}
    for name, entry in registry.built_in_methods().items():
        lossy = entry.guarantee == registry.LOSSY
        groups.setdefault((entry.family, lossy), []).append(f"`{name}`")
    return [
        {
            "what drafts": family + (", [lossy](../how-to/lossy.md)" if lossy else ""),
            "methods": ", ".join(names),
        }
        for (family, lossy), names in sorted(
            groups.items(), key=lambda group: (registry.FAMILIES.index(group[0][0]), group[0][1])
        )
    ]


def _format_type(annotation: Any) -> str:
    """Return a parameter's type as text, e.g. "int | heuristic | oracle"."""
    if get_origin(annotation) is Literal:
        return " | ".join(map(str, get_args(annotation)))
    if get_origin(annotation) in (Union, UnionType):
        return " | ".join(map(_format_type, get_args(annotation)))
    return "none" if annotation is NoneType else str(getattr(annotation, "__name__", annotation))

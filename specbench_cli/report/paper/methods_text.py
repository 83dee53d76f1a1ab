"""Text "how this was measured" for a paper, generated from a run's manifest.

Every sentence is based on a fact of the manifest. Unknown facts have no sentence.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from specbench_cli.summary import formats
from specbench_cli.summary.facts import FUSED, HOSTED, Facts
from specbench_cli.summary.metrics import MethodSummary
from specbench_cli.summary.summary import Summary

_DTYPES = {"float32": "32-bit", "float16": "16-bit", "bfloat16": "bfloat16"}
_RULES = {
    "greedy": "greedily",
    "rejection": "by rejection sampling",
    "block": "by block verification",
    "coupled": "by sampling with noise that is the same for all methods",
    "replay": "by replaying vanilla's tokens to every method",
}


def sentences(summary: Summary, manifest: Mapping[str, Any]) -> list[str]:
    """Return the sentences as plain text."""
    facts = Facts.from_manifest(manifest)
    config = manifest.get("config", {}).get("effective", {})
    found = [
        _what(summary, facts, manifest),
        _forced(facts),
        _models(manifest, config),
        _made_up(facts),
        _decoding(config, facts),
        _machine(manifest, config),
        _protocol(summary, facts, manifest),
        _quiet(summary, facts, manifest),
        _verdicts(summary, manifest),
        _lossy(summary),
        _statistics(summary, facts),
    ]
    return [sentence for sentence in found if sentence]


def _what(summary: Summary, facts: Facts, manifest: Mapping[str, Any]) -> str:
    versions = {task["name"]: task.get("version") for task in manifest.get("tasks", [])}
    tasks = [
        f"{n} questions of {task}" + (f" (version {versions[task]})" if versions.get(task) else "")
        for task, n in summary.prompts.items()
    ]
    if "imported" in manifest:
        return f"Read from answer files of Spec-Bench: {_and(tasks)}."
    program = f" with specbench {manifest['version']}" if "version" in manifest else ""
    runs = f" in {facts.runs} runs" if facts.runs > 1 else ""
    return f"Measured{program}{runs} on {_and(tasks)}."


def _forced(facts: Facts) -> str:
    if not facts.forced:
        return ""
    return (
        f"The runs do not belong together: they differ in {'; '.join(facts.forced)}. They were put"
        " side by side by force, and where they differ the following is said of the first."
    )


def _made_up(facts: Facts) -> str:
    if not facts.synthetic:
        return ""
    return f"The run is synthetic: {facts.synthetic}; it measures costs, and no model's speedup."


def _models(manifest: Mapping[str, Any], config: Mapping[str, Any]) -> str:
    models = manifest.get("models", {})
    target, draft = models.get("target") or {}, models.get("draft") or {}
    if "label" not in target or "imported" in manifest:
        return ""
    was = "The target was"
    if manifest.get("targets"):  # sizes are those of the first target
        was, target, draft = "Targets were", _named(target), _named(draft)
    said = f"{was} {_model(target)}"
    said += f", the draft {_model(draft)}" if "label" in draft else ""
    dtype = _DTYPES.get(str(config.get("dtype")), "")
    return f"{said}, run in {dtype} floating point." if dtype else f"{said}."


def _named(model: Mapping[str, Any]) -> Mapping[str, Any]:
    return {key: value for key, value in model.items() if key == "label"}


def _model(model: Mapping[str, Any]) -> str:
    size = model.get("parameters")
    facts = [f"{size / 1e6:.1f}M parameters"] if size else []
    if model.get("engine", FUSED) != FUSED:
        facts.append(f"run through {HOSTED}")
    return f"{model['label']} ({', '.join(facts)})" if facts else str(model["label"])


def _decoding(config: Mapping[str, Any], facts: Facts) -> str:
    rule = str(config.get("verify", ""))
    if rule not in _RULES:
        return ""
    heat = "" if rule == "greedy" else f" at temperature {config.get('temperature', 0):g}"
    cut = config.get("max_new_tokens")
    held = f" with contrast {facts.contrast}" if facts.contrast else ""
    held += f" {facts.grammar_phrase}" if facts.grammar else ""
    length = f", at most {cut} tokens a turn" if cut else ""
    return f"Text was decoded {_RULES[rule]}{heat}{held}, one request at a time{length}, seed" + (
        f" {config.get('seed', 0)}."
    )


def _machine(manifest: Mapping[str, Any], config: Mapping[str, Any]) -> str:
    machine = manifest.get("machine", {})
    hardware = machine.get("hardware", machine)
    if not hardware.get("cpu"):
        return ""
    parts = [f"{hardware['cpu']} with {hardware.get('cores')} cores"]
    if hardware.get("memory_gib"):
        parts.append(f"{hardware['memory_gib']} GiB of memory")
    parts += [str(device.get("name", device)) for device in hardware.get("accelerators") or []]
    said = (
        f"The machine had an {parts[0]}"
        if parts[0][0] in "AEIOU"
        else f"The machine had a {parts[0]}"
    )
    said += f" and {_and(parts[1:])}" if parts[1:] else ""
    count = config.get("threads")
    were = "thread was" if count == 1 else "threads were"
    threads = f"; {count} {were} used" if count else ""
    versions = machine.get("versions") or manifest.get("versions", {})
    software = [
        f"{name} {versions[key]}"
        for key, name in (("torch", "PyTorch"), ("transformers", "transformers"))
        if versions.get(key)
    ]
    return f"{said}{threads}" + (f", with {_and(software)}." if software else ".")


def _protocol(summary: Summary, facts: Facts, manifest: Mapping[str, Any]) -> str:
    if "imported" in manifest:
        return (
            "Times and token counts are those of the files; they hold no token ids, so no output"
            " was checked."
        )
    passes = summary.passes
    often = "once" if passes == 1 else f"in each of {passes} processes"
    tuned = f" Parameters were {facts.tuned}." if facts.tuned else ""
    return (
        f"Every method decoded every question {often}, right after one another in a balanced random"
        " order, with vanilla decoding in the same engine as the baseline; the clock ran from the"
        f" prompt's token ids on the device to the last committed token, prefill included.{tuned}"
    )


def _quiet(summary: Summary, facts: Facts, manifest: Mapping[str, Any]) -> str:
    if "imported" in manifest:
        return ""
    void = sum(row.n_void for row in summary.rows)
    cells = sum(row.n_cells for row in summary.rows)
    if facts.noisy:
        return "Other programs ran beside it and the times were kept: they are noisy."
    return (
        "Cells measured while other programs took more than 5% of the CPUs were repeated, then left"
        f" out: {void} of {cells}."
    )


def _verdicts(summary: Summary, manifest: Mapping[str, Any]) -> str:
    weakest = summary.proof()
    if weakest is None:
        return ""
    row, bound = weakest
    tolerance = (manifest.get("tolerance") or {}).get("value")
    ties = (
        f", where tokens within {tolerance:.1e} of the best score count as tied"
        if tolerance
        else ""
    )
    return (
        f"Outputs were compared with vanilla's token by token{ties}: of {row.questions_checked}"
        f" questions {row.questions_mismatched} were mismatched for {row.label}, the row proved"
        f" least, so that its rate of mismatches is at most {formats.percent(bound, 2)} (95%)."
    )


def _lossy(summary: Summary) -> str:
    if not summary.lossy:
        return ""
    ruled = any(row.accept_rule for row in summary.lossy)
    how = (
        " There a draft token that the lossless rule rejects stands all the same where an accept"
        " rule lets it pass; a random one is the control of the others."
    )
    return (
        "The output of these rows is not vanilla's, and they were ranked apart:"
        f" {_and([_promise(row) for row in summary.lossy])}.{how if ruled else ''}"
    )


def _promise(row: MethodSummary) -> str:
    """Return a lossy method with its guarantee, its accept rule and the rule's effect."""
    words = [f"guarantee: {row.guarantee.replace('_', ' ')}"]
    if row.accept_rule:
        words.append(f"accept rule: {row.accept_rule}")
    if row.relaxed is not None:
        words.append(f"{formats.percent(row.relaxed)} of the tokens relaxed")
    return f"{row.label} ({', '.join(words)})"


def _statistics(summary: Summary, facts: Facts) -> str:
    units = "questions and processes" if summary.passes > 1 else "questions"
    ranked = (
        ""
        if facts.unranked
        else "; rows that share a letter do not differ significantly at a simultaneous 95% level"
    )
    return (
        "Speedups are vanilla's time over the method's on the same questions, a ratio of sums, with"
        f" 95% intervals from a paired, clustered bootstrap-t on the log ratio over {units},"
        f" stratified by task family{ranked}."
    )


def _and(words: list[str]) -> str:
    *most, last = words or [""]
    return f"{', '.join(most)} and {last}" if most else last

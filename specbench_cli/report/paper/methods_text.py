"""Paragraph "How this was measured" for a paper, generated from a run's manifest.

Each sentence states facts from the manifest. A sentence is omitted if its facts are unknown.
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
    """Return the sentences of the paragraph as plain text."""
    facts = Facts.from_manifest(manifest)
    config = manifest.get("config", {}).get("effective", {})
    found = [
        _what_was_measured(summary, facts, manifest),
        _forced(facts),
        _models(manifest, config),
        _synthetic_note(facts),
        _decoding(config, facts),
        _machine(manifest, config),
        _protocol(summary, facts, manifest),
        _quiet(summary, facts, manifest),
        _verdicts(summary, manifest),
        _lossy(summary),
        _statistics(summary, facts),
    ]
    return [sentence for sentence in found if sentence]


def _what_was_measured(summary: Summary, facts: Facts, manifest: Mapping[str, Any]) -> str:
    versions = {task["name"]: task.get("version") for task in manifest.get("tasks", [])}
    tasks = [
        f"{n} questions of {task}" + (f" (version {versions[task]})" if versions.get(task) else "")
        for task, n in summary.prompts.items()
    ]
    if "imported" in manifest:
        return f"Read from answer files of Spec-Bench: {_join_words(tasks)}."
    program = f" with specbench {manifest['version']}" if "version" in manifest else ""
    runs = f" in {facts.runs} runs" if facts.runs > 1 else ""
    return f"Measured{program}{runs} on {_join_words(tasks)}."


def _forced(facts: Facts) -> str:
    if not facts.forced:
        return ""
    return (
        f"The runs are not comparable: they differ in {'; '.join(facts.forced)}. They are shown"
        " side by side (--force). Where they differ, the following describes the first run."
    )


def _synthetic_note(facts: Facts) -> str:
    if not facts.synthetic:
        return ""
    return (
        f"The run is synthetic: {facts.synthetic}. It measures costs, not the speedup of a model."
    )


def _models(manifest: Mapping[str, Any], config: Mapping[str, Any]) -> str:
    models = manifest.get("models", {})
    target, draft = models.get("target") or {}, models.get("draft") or {}
    if "label" not in target or "imported" in manifest:
        return ""
    subject = "The target was"
    if manifest.get("targets"):  # sizes are those of the first target
        subject, target, draft = "Targets were", _label_only(target), _label_only(draft)
    text = f"{subject} {_model(target)}"
    text += f", the draft {_model(draft)}" if "label" in draft else ""
    dtype = _DTYPES.get(str(config.get("dtype")), "")
    return f"{text}, run in {dtype} floating point." if dtype else f"{text}."


def _label_only(model: Mapping[str, Any]) -> Mapping[str, Any]:
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
    temperature = "" if rule == "greedy" else f" at temperature {config.get('temperature', 0):g}"
    limit = config.get("max_new_tokens")
    constraints = f" with contrast {facts.contrast}" if facts.contrast else ""
    constraints += f" {facts.grammar_phrase}" if facts.grammar else ""
    length = f", at most {limit} tokens a turn" if limit else ""
    return (
        f"Text was decoded {_RULES[rule]}{temperature}{constraints}, one request at a time{length},"
        f" seed {config.get('seed', 0)}."
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
    text = (
        f"The machine had an {parts[0]}"
        if parts[0][0] in "AEIOU"
        else f"The machine had a {parts[0]}"
    )
    text += f" and {_join_words(parts[1:])}" if parts[1:] else ""
    count = config.get("threads")
    verb = "thread was" if count == 1 else "threads were"
    threads = f"; {count} {verb} used" if count else ""
    versions = machine.get("versions") or manifest.get("versions", {})
    software = [
        f"{name} {versions[key]}"
        for key, name in (("torch", "PyTorch"), ("transformers", "transformers"))
        if versions.get(key)
    ]
    return f"{text}{threads}" + (f", with {_join_words(software)}." if software else ".")


def _protocol(summary: Summary, facts: Facts, manifest: Mapping[str, Any]) -> str:
    if "imported" in manifest:
        return (
            "Times and token counts are those of the files. The files have no token ids, so no"
            " output was checked."
        )
    passes = summary.passes
    repetition = "once" if passes == 1 else f"in each of {passes} processes"
    tuned = f" Parameters were {facts.tuned}." if facts.tuned else ""
    return (
        f"Every method decoded every question {repetition}, right after one another in a balanced"
        " random order. Vanilla decoding in the same engine is the baseline. The clock ran from the"
        f" prompt's token ids on the device to the last committed token, prefill included.{tuned}"
    )


def _quiet(summary: Summary, facts: Facts, manifest: Mapping[str, Any]) -> str:
    if "imported" in manifest:
        return ""
    void = sum(row.n_void for row in summary.rows)
    cells = sum(row.n_cells for row in summary.rows)
    if facts.noisy:
        return (
            "Other programs ran at the same time, so the times are noisy. They were not left out."
        )
    return (
        "Outputs that were measured while other programs used more than 5% of the CPUs were"
        f" measured again. If the repeat was noisy, too, the time was left out: {void} of {cells}."
    )


def _verdicts(summary: Summary, manifest: Mapping[str, Any]) -> str:
    weakest = summary.proof()
    if weakest is None:
        return ""
    row, bound = weakest
    tolerance = (manifest.get("tolerance") or {}).get("value")
    ties = (
        f" (tokens whose score is within {tolerance:.1e} of the best one count as ties)"
        if tolerance
        else ""
    )
    return (
        f"Outputs were compared with vanilla's token by token{ties}. The method with the weakest"
        f" proof is {row.label}: {row.questions_mismatched} of {row.questions_checked} questions"
        f" were mismatched, so its mismatch rate is at most {formats.percent(bound, 2)} (95%)."
    )


def _lossy(summary: Summary) -> str:
    if not summary.lossy:
        return ""
    ruled = any(row.accept_rule for row in summary.lossy)
    how = (
        " A lossy accept rule also accepts some draft tokens that the lossless rule rejects. A"
        " random accept rule is the control of the other rules."
    )
    return (
        "These methods are lossy, so they were not ranked with the others:"
        f" {_join_words([_describe_lossy(row) for row in summary.lossy])}.{how if ruled else ''}"
    )


def _describe_lossy(row: MethodSummary) -> str:
    """Return a lossy method with its guarantee, accept rule and share of relaxed tokens."""
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
        else ". Methods that share a letter do not differ significantly (simultaneous 95% level)"
    )
    return (
        "A speedup is vanilla's time divided by the method's on the same questions, as a ratio of"
        f" sums. The 95% intervals are from a paired, clustered bootstrap-t on the log ratio over"
        f" {units}, stratified by task family{ranked}."
    )


def _join_words(words: list[str]) -> str:
    *most, last = words or [""]
    return f"{', '.join(most)} and {last}" if most else last

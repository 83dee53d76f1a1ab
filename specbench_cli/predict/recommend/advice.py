"""The result of `specbench recommend`: a method with its parameters, or the reason for none."""

from __future__ import annotations

import shlex
from collections.abc import Mapping, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

from specbench_cli import registry
from specbench_cli.engine.method import Method
from specbench_cli.models.aliases import aliases
from specbench_cli.models.resolve import Checkpoint, resolve
from specbench_cli.plan.plan import AUTO
from specbench_cli.predict.recommend.engines import ServedModels, launch_commands
from specbench_cli.predict.recommend.journal import Journal
from specbench_cli.predict.recommend.search import SearchResult
from specbench_cli.predict.recommend.speedup_model import ModelledSpeedups, model_speedups
from specbench_cli.store.run_dir import RunDir
from specbench_cli.store.schema import LOSSLESS
from specbench_cli.summary.metrics import MethodSummary
from specbench_cli.summary.summary import Summary

NOTHING = "every candidate of the search failed"


def advise(
    journal: Journal,
    search: SearchResult,
    summary: Summary | None,
    *,
    sizes: Sequence[int],
    costs: Path | None,
    others: Sequence[Path],
) -> dict[str, Any]:
    """Return the recommendation as the JSON object that `--json` prints.

    Args:
        journal: request and progress of the recommendation.
        summary: summary of the confirmation run, or None if nothing was confirmed.
        sizes, costs, others: as in `speedup_model.model_speedups`.
    Raises:
        UsageError: as in `speedup_model.model_speedups`.
    """
    rows = {row.label: row for row in summary.rows} if summary is not None else {}
    confirmed = [
        _confirmed_result(journal, rows[label]) for label in search.confirmed if label in rows
    ]
    best = next((each for each in confirmed if each["lossless"] and each["pays"]), None)
    lossy = next((each for each in confirmed if not each["lossless"] and each["pays"]), None)
    chosen = [each for each in (best, lossy) if each is not None]
    labels = [each["label"] for each in chosen]
    modelled = ModelledSpeedups([], [], {})
    if summary is not None and search.run is not None and labels:
        modelled = model_speedups(RunDir.open(search.run), labels, sizes, costs, others)
    recommended = best or lossy
    return {
        "minutes": journal.minutes,
        "spent_s": round(sum(each.seconds or 0.0 for each in journal.rounds.values()), 1),
        "seed": journal.config.seed,
        "recommended": best,
        "lossy": lossy,
        "why": _explain(confirmed, best, search),
        "confirmed": confirmed,
        "held_out": {
            "prompts": max((each["prompts"] for each in confirmed), default=0),
            "run": None if search.run is None else search.run.name,
        },
        "search": [
            {**asdict(trial), "method": journal.choice(label).name}
            for label, trial in search.best.trials.items()
        ],
        "rounds": search.best.rounds,
        "untried": search.best.untried,
        "left_out": journal.left_out,
        "modelled": asdict(modelled),
        "command": None if recommended is None else _command(journal, recommended),
        "lines": [] if recommended is None else _lines(journal, recommended, search),
    }


def _confirmed_result(journal: Journal, row: MethodSummary) -> dict[str, Any]:
    """Return a method's results on held-out prompts.

    The method pays off if the whole interval of its speedup is above 1.
    """
    sound = not row.broken and row.speedup_low is not None

    def copy_metrics(*metrics: str) -> dict[str, Any]:
        return {name: getattr(row, name) for name in metrics}

    return {
        "label": row.label,
        "method": row.method,
        "set": dict(journal.choice(row.label).params),
        "params": dict(row.params),
        **copy_metrics(
            "lossless", "guarantee", "speedup", "speedup_low", "speedup_high", "speedup_note"
        ),
        "broken": row.broken_why,
        "pays": sound and (row.speedup_low or 0.0) > 1.0,
        **copy_metrics("mat", "tokens_per_s", "identical", "near_tie", "mismatch", "unchecked"),
        "prompts": row.n_prompts,
        "outputs": row.n_outputs,
        **copy_metrics("mismatch_bound"),
        **copy_metrics("score_difference", "score_difference_low", "score_difference_high"),
    }


def _explain(
    confirmed: Sequence[Mapping[str, Any]], best: Mapping[str, Any] | None, search: SearchResult
) -> str:
    """Return the reason for the recommendation, or the reason why there is none."""
    if best is not None:
        return "on held-out prompts the whole interval of its speedup is above 1"
    lossless = [each for each in confirmed if each["lossless"]]
    if not lossless:
        faults = {trial.out for trial in search.best.trials.values() if trial.out is not None}
        return "; ".join([NOTHING, *sorted(faults)][:4])
    found = lossless[0]
    if found["broken"]:
        return f"{found['label']} was fastest in the search, but is broken: {found['broken']}"
    if found["speedup_low"] is None:
        why = found["speedup_note"] or "it has no interval"
        return (
            f"{found['label']} was fastest in the search, but its speedup is not confirmed: {why}"
        )
    between = f"[{found['speedup_low']:.2f}, {found['speedup_high']:.2f}]"
    return (
        f"{found['label']} was fastest in the search, but on held-out prompts the interval of its"
        f" speedup, {between}, is not above 1"
    )


def _command(journal: Journal, recommended: Mapping[str, Any]) -> str:
    """Return the `specbench run` command for a method with its settings."""
    words = ["specbench", "run", "-m", str(recommended["method"])]
    for name, value in recommended["set"].items():
        words += ["--set", f"{recommended['method']}.{name}={value}"]
    for name in ("target", "draft"):
        if name in journal.config.model_fields_set and getattr(journal.config, name) is not None:
            words += [f"--{name}", getattr(journal.config, name)]
    return shlex.join(words)


def _lines(
    journal: Journal, recommended: Mapping[str, Any], search: SearchResult
) -> list[dict[str, Any]]:
    """Return one command per serving engine (such as vLLM), which starts a method in it.

    The method is the recommended one if the engine supports it. Otherwise it is the best candidate
    of the search that the engine supports and that was faster than vanilla.
    """
    others = sorted(
        search.best.trials.values(), key=lambda each: (-each.rounds, -(each.ratio or 0))
    )
    ranked = [recommended["label"]] + [
        trial.label
        for trial in others
        if trial.out is None and (trial.ratio or 0.0) > 1.0 and trial.label != recommended["label"]
    ]
    rule = journal.config.rule
    found: dict[str, dict[str, Any]] = {}
    for label in ranked:
        choice = journal.choice(label)
        method = registry.build(choice.name, choice.params)
        if (method.guarantee(rule) in LOSSLESS) is not recommended["lossless"]:
            continue
        params = method.params.model_dump(mode="json")
        for line in launch_commands(choice.name, params, _models(journal, method)):
            if line.engine not in found or (found[line.engine]["lacks"] and not line.lacks):
                found[line.engine] = {**asdict(line), "of": label, "confirmed": label == ranked[0]}
    return list(found.values())


def _models(journal: Journal, method: Method) -> ServedModels:
    """Return the names of a method's models: hub ids, or folders on this machine."""
    target = resolve(journal.config.target)
    named = journal.config.draft
    draft = target.draft if named in (None, AUTO) else named
    drafting = resolve(draft) if draft is not None and "draft" in method.requirements else None
    wanted = next(iter(method.artifacts()), None)
    head = None if wanted is None else wanted.source
    if wanted is not None and head == AUTO:
        head = target.heads.get(wanted.kind.kind)
    return ServedModels(
        target=_model_name(target),
        draft=None if drafting is None else _model_name(drafting),
        head=head,
    )


def _model_name(model: Checkpoint) -> str:
    """Return the hub id of a model, or its folder on this machine."""
    alias = aliases().get(model.label)
    return model.hub_id or (alias and alias.hub) or str(model.path)

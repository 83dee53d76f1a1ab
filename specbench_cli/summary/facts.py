"""Facts about a run from its manifest, which a report shows above its results."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from specbench_cli.config.sweep import format_params
from specbench_cli.errors import to_one_line
from specbench_cli.store.schema import BASELINE

FUSED, HOSTED = "FusedDecoder", "transformers' module"
"""Name of specbench's own decoder in manifests, and the reports' name for any other decoder."""

_DTYPES = {"float32": "fp32", "float16": "fp16", "bfloat16": "bf16"}


@dataclass(frozen=True, slots=True)
class Facts:
    """Facts about a run.

    tasks: Task -> "trained" if the embedded models were trained on it, "plumbing" if not. "" for
        models that are not embedded in specbench.
    aa_noise: Noise floor as a fraction: the difference between two measurements of vanilla, made
        outside this run. None if unknown.
    tuned: How parameters were tuned, as one line. "" if they were not.
    synthetic: Parts of the models that are artificial, such as random weights. "" if none are.
        grammar: Name of the grammar that constrains outputs. "" if there is none.
    contrast: Option `--contrast`, as typed. "" if it is not set.
    batch: Number of prompts in a batch.
    load: Option `--load` (arrival times of requests), as typed. "" if it is not set.
    runs: Number of runs that are combined.
    forced: Differences between the combined runs, if they are incompatible.
    targets: Names of the combined runs, if each has its own target or draft model.
    mixed: What changed while the run was interrupted, such as a version.
    dropped: Methods that were dropped after failures, each with the reason.
    ended_early: True if the run ended because only vanilla was left.
    left_out: Methods that could not run on the run's machine, each with the reason.
    limited: True if `--limit` omitted questions.
    hosted: Models ("target", "draft") that ran through transformers' own module. The others
        ran through specbench's decoder.
    """

    version: str
    status: str
    target: str
    draft: str | None
    tasks: dict[str, str]
    decoding: str
    dtype: str
    device: str
    graphs: bool
    threads: int | None
    seed: int | None
    noisy: bool
    aa_noise: float | None
    tuned: str
    synthetic: str = ""
    grammar: str = ""
    contrast: str = ""
    batch: int = 1
    load: str = ""
    runs: int = 1
    forced: tuple[str, ...] = ()
    targets: tuple[str, ...] = ()
    mixed: tuple[str, ...] = ()
    dropped: tuple[str, ...] = ()
    ended_early: bool = False
    left_out: tuple[str, ...] = ()
    hosted: frozenset[str] = frozenset()
    limited: bool = False

    @classmethod
    def from_manifest(cls, manifest: Mapping[str, Any]) -> Facts:
        """Read the facts from a manifest. Missing facts are empty."""
        config = manifest.get("config", {}).get("effective", {})
        models = manifest.get("models", {})
        draft = models.get("draft") or {}
        dtype = str(config.get("dtype", ""))
        return cls(
            version=str(manifest.get("version", "?")),
            status=str(manifest.get("status", "?")),
            target=str(models.get("target", {}).get("label", "?")),
            draft=draft.get("label"),
            tasks={task["name"]: task.get("embedded") or "" for task in manifest.get("tasks", [])},
            decoding=_decoding(config),
            dtype=_DTYPES.get(dtype, dtype),
            device=str(config.get("device", "")),
            graphs=config.get("graphs") == "on",
            threads=config.get("threads"),
            seed=config.get("seed"),
            limited=config.get("limit") is not None,
            noisy=bool(manifest.get("noisy", False)),
            aa_noise=manifest.get("aa_noise"),
            tuned=_tuned(manifest.get("tuning")),
            synthetic=str(manifest.get("synthetic") or ""),
            grammar=(manifest.get("grammar") or {}).get("name", ""),
            contrast=",".join(f"{k}={v:g}" for k, v in (config.get("contrast") or {}).items()),
            batch=config.get("batch") or 1,
            load=config.get("load") or "",
            runs=len(manifest.get("runs") or [None]),
            forced=tuple(manifest.get("forced") or ()),
            targets=tuple(manifest.get("targets") or ()),
            dropped=_reasons(manifest, "dropped"),
            ended_early=_ended_early(manifest),
            left_out=_reasons(manifest, "left_out"),
            mixed=tuple(manifest.get("mixed") or ()),
            hosted=frozenset(
                role
                for role, model in models.items()
                if (model or {}).get("engine", FUSED) != FUSED
            ),
        )

    @property
    def grammar_phrase(self) -> str:
        """Phrase "under grammar NAME"."""
        return f"under grammar {self.grammar}"

    @property
    def constraints(self) -> str:
        """Options `--contrast` and `--grammar` as a phrase, or "" if neither is set.

        Both options change the target's distribution.
        """
        contrast = f"contrast {self.contrast}" if self.contrast else ""
        return ", ".join(filter(None, (contrast, self.grammar_phrase if self.grammar else "")))

    def engine_suffix(self, role: str) -> str:
        """Return a suffix for the name of a model that ran through transformers' own module.

        Return "" for models that ran through specbench's decoder.

        Args:
            role: "target" or "draft".
        """
        return f" ({HOSTED})" if role in self.hosted else ""

    @property
    def unranked(self) -> bool:
        """True if the methods are of incompatible runs, so that they cannot be ranked together."""
        return bool(self.forced or self.targets)

    @property
    def plumbing(self) -> list[str]:
        """Tasks for which an embedded target was not trained. [] if the target is not embedded."""
        if not self.target.startswith("embedded"):
            return []
        return [task for task, relation in self.tasks.items() if relation == "plumbing"]

    def header(self, prompts: Mapping[str, int], width: int) -> list[str]:
        """Return the header of a report: one line, or two if one is wider than `width`.

        Args:
            prompts: Task -> number of questions.
        """
        models = [
            f"specbench {self.version}",
            f"target {self.target}{self.engine_suffix('target')}",
        ]
        if self.draft:
            models.append(f"draft {self.draft}{self.engine_suffix('draft')}")
        work = ["SYNTHETIC"] if self.synthetic else []
        work += [f"{task} {n} prompts" for task, n in prompts.items()]
        work.append(f"{self.decoding} {self.dtype}".strip())
        if self.constraints:
            work.append(self.constraints)
        if self.device not in ("", "auto", "cpu"):
            work.append(f"{self.device}{' with graphs' * self.graphs}")
        if self.threads:
            work.append(f"{self.threads} thread{'s' * (self.threads != 1)}")
        if self.batch > 1:
            work.append(f"batch {self.batch}")
        if self.load:
            work.append(f"load {self.load}")
        if self.seed is not None:
            work.append(f"seed {self.seed}")
        if self.runs > 1:
            work.append(f"{self.runs} runs")
        line = "  ".join(models + work)
        lines = [line] if len(line) <= width else ["  ".join(models), "  ".join(work)]
        return lines + [f"forced: differs in {difference}" for difference in self.forced]


def _ended_early(manifest: Mapping[str, Any]) -> bool:
    """Return True if all methods except vanilla were dropped."""
    rows = manifest.get("rows") or ()
    others = {row.get("label") for row in rows if row.get("method") != BASELINE}
    return bool(others) and others <= {*(manifest.get("dropped") or {})}


def _tuned(tuning: Mapping[str, Any] | None) -> str:
    if not tuning:
        return ""
    development, held_out = (sum(tuning[part].values()) for part in ("development", "held_out"))
    criterion = "decode time" if tuning["by"] == "time" else "cost of forwards"
    chosen = "; ".join(
        f"{label} {' '.join(format_params(row['passed'])) or 'as it is'} of {row['tried']}"
        for label, row in tuning.get("rows", {}).items()
        if row["tried"] > 1
    )
    return (
        f"tuned: the best by {criterion} of at most {tuning['budget']} a method on {development}"
        f" development questions; figures are of the {held_out} others"
        + (f"; chosen: {chosen}" if chosen else "")
    )


def _decoding(config: Mapping[str, Any]) -> str:
    rule = str(config.get("verify", "greedy"))
    if rule == "greedy" or "temperature" not in config:
        return rule
    return f"{rule} T={config['temperature']:g}"


def _reasons(manifest: Mapping[str, Any], key: str) -> tuple[str, ...]:
    reasons = (manifest.get(key) or {}).items()
    return tuple(f"{label}: {to_one_line(why)}" for label, why in reasons)

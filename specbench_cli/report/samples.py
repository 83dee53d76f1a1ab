"""Export of a run's outputs to other evaluation tools: Inspect AI and lm-evaluation-harness.

Inspect AI's log viewer (`inspect view --log-dir DIR`) reads one JSON log per task and method, with
the fields of `inspect_ai.log.EvalLog`, version 2. Readers of lm-evaluation-harness logs
(`--log_samples`) read one folder per method, with `results_*.json` and `samples_<task>_*.jsonl`.

Each output is one sample. Its scores are `same_output` (1 if it equals vanilla's output) and the
task's score, if there is one. The speedup of a method is stored in the metadata of the log.
"""

from __future__ import annotations

import hashlib
import json
import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from datetime import datetime
from pathlib import Path
from typing import Any

from specbench_cli.errors import EnvironmentFault
from specbench_cli.report.report_data import read_report_data
from specbench_cli.report.tokens import load_text_decoder
from specbench_cli.store.run_dir import Prompt, RunDir
from specbench_cli.store.schema import BASELINE, Record
from specbench_cli.summary.comparison import Decode
from specbench_cli.summary.facts import Facts
from specbench_cli.summary.metrics import MethodSummary

SAME = "same_output"
"""Name of the score that is 1 if an output equals vanilla's, or differs only at a near-tie."""

_SAME_BY = {"reference": 1.0, "identical": 1.0, "near-tie": 1.0, "mismatch": 0.0}
_STOPPED = {"eos": "stop", "stop": "stop", "length": "max_tokens", "error": "unknown"}
_FIGURES = (
    "speedup", "speedup_low", "speedup_high", "mat", "acceptance_rate", "tokens_per_s",
    "score_difference", "score_difference_low", "score_difference_high", "n_scored",
)  # fmt: skip
_GENERATION = ("temperature", "top_p", "top_k", "seed")
_LONGEST_SLUG = 80
"""Maximum number of characters of a slug. File systems limit names to 255 bytes."""


@dataclass(frozen=True, slots=True)
class Sample:
    """An output with its prompt and its scores.

    Attributes:
        prompt: Prompt text as the model receives it.
        reference: Vanilla's output for the prompt. Empty if there is none.
    """

    record: Record
    stored_prompt: Prompt
    prompt: str
    output: str
    reference: str

    @property
    def id(self) -> str:
        """Id of the sample: prompt id and turn."""
        return f"{self.record.prompt_id} turn {self.record.turn}"

    @property
    def scores(self) -> dict[str, float]:
        """Score name -> value. Unknown scores are omitted."""
        record = self.record
        kind = "unchecked" if record.verdict is None else record.verdict.kind
        same = {} if kind not in _SAME_BY else {SAME: _SAME_BY[kind]}
        return same if record.score is None else {**same, "score": record.score}


@dataclass(frozen=True, slots=True)
class SampleSeries:
    """All samples of one method on one task, in the order of the run."""

    task: str
    row: MethodSummary
    samples: tuple[Sample, ...]

    @property
    def means(self) -> dict[str, float]:
        """Score name -> mean over the samples that have this score."""
        names = dict.fromkeys(name for sample in self.samples for name in sample.scores)
        method_series = {
            name: [s.scores[name] for s in self.samples if name in s.scores] for name in names
        }
        return {name: sum(values) / len(values) for name, values in method_series.items()}

    @property
    def figures(self) -> dict[str, Any]:
        """Results of the method over all tasks of the run, such as the speedup."""
        figures = {name: getattr(self.row, name) for name in _FIGURES}
        return {**figures, "guarantee": self.row.guarantee, "broken": self.row.broken_why}


def export(run: RunDir, folder: Path, formats: Sequence[str]) -> list[Path]:
    """Write the outputs of a run. Each format gets its own folder.

    Raises:
        EnvironmentFault: The target's tokenizer is not on this machine.
    """
    target = Facts.from_manifest(run.manifest).target
    decode = load_text_decoder(target)
    if decode is None:
        raise EnvironmentFault(
            f"the tokenizer of {target} is not on this machine, and the outputs are token ids",
            f"run the command in the folder of the model, or download it: specbench run --target"
            f" {target} --limit 1",
        )
    series = list(_series(run, decode))
    return [file for name in formats for file in FORMATS[name](run, series, folder / name)]


def _series(run: RunDir, decode: Decode) -> Iterator[SampleSeries]:
    prompts = {(prompt.prompt_id, prompt.turn): prompt for prompt in run.prompts()}
    method_series: dict[tuple[str, str], list[Record]] = {}
    vanilla: dict[tuple[str, int], str] = {}
    for record in run.records():
        method_series.setdefault((record.task, record.label), []).append(record)
        if record.label == BASELINE:
            vanilla.setdefault((record.prompt_id, record.turn), decode(record.output_ids or ()))
    rows = {row.label: row for row in read_report_data(run).summary.rows}
    for (task, label), records in method_series.items():
        samples = []
        for record in records:
            at = record.prompt_id, record.turn
            stored_prompt, text = prompts[at], decode(record.output_ids or ())
            samples.append(
                Sample(record, stored_prompt, decode(stored_prompt.ids), text, vanilla.get(at, ""))
            )
        yield SampleSeries(task, rows[label], tuple(samples))


def _inspect(run: RunDir, series: Sequence[SampleSeries], folder: Path) -> list[Path]:
    """Write one Inspect log per task and method. A file name is time, task and id."""
    created = str(run.manifest["created_utc"])
    files = []
    for one in series:
        id_ = _hash(run.path.name, one.task, one.row.label)[:22]
        task = _slug(f"{one.task}-{one.row.label}").replace("_", "-")  # Inspect splits names at _
        name = f"{created.replace(':', '-')}_{task}_{id_}.json"
        files.append(_write_file(folder / name, json.dumps(_log(run, one, id_), indent=1)))
    return files


def _log(run: RunDir, series: SampleSeries, id_: str) -> dict[str, Any]:
    manifest, config = run.manifest, run.manifest["config"]["effective"]
    model, row = f"specbench/{Facts.from_manifest(manifest).target}", series.row
    done = manifest.get("status") == "finished"
    ids = list(dict.fromkeys(sample.id for sample in series.samples))
    generation = {name: config.get(name) for name in _GENERATION}
    return {
        "version": 2,
        "status": "success" if done else "cancelled",
        "eval": {
            "eval_id": id_,
            "run_id": run.path.name,
            "created": manifest["created_utc"],
            "task": f"{series.task}-{row.label}",
            "task_id": id_,
            "task_args": {"method": row.method, **row.params},
            "solver": row.label,
            "tags": ["specbench", row.guarantee],
            "dataset": {"name": series.task, "samples": len(ids), "sample_ids": ids},
            "model": model,
            "model_generate_config": {**generation, "max_tokens": config.get("max_new_tokens")},
            "config": {"epochs": config.get("repeats", 1)},
            "packages": {"specbench-cli": manifest["version"]},
            "metadata": {"over": "all tasks of the run", **series.figures},
            "scorers": [{"name": name} for name in series.means],
        },
        "plan": {
            "name": "specbench",
            "steps": [{"solver": row.label, "params": row.params}],
            "config": {},
        },
        "results": {
            "total_samples": len(series.samples),
            "completed_samples": sum(s.record.error is None for s in series.samples),
            "scores": [
                {"name": name, "scorer": name, "metrics": {"mean": {"name": "mean", "value": mean}}}
                for name, mean in series.means.items()
            ],
        },
        "stats": {
            "started_at": manifest["created_utc"],
            "completed_at": manifest.get("finished_utc") or "",
        },
        "samples": [_inspect_sample(sample, model) for sample in series.samples],
    }


def _inspect_sample(sample: Sample, model: str) -> dict[str, Any]:
    record, stored_prompt = sample.record, sample.stored_prompt
    text = {"role": "assistant", "content": sample.output, "source": "generate", "model": model}
    n_input, n_output = len(stored_prompt.ids), record.n_tokens or 0
    usage = {"input_tokens": n_input, "output_tokens": n_output, "total_tokens": n_input + n_output}
    seconds = None if record.ns.total is None else record.ns.total / 1e9
    failed = record.error and {"message": record.error, "traceback": "", "traceback_ansi": ""}
    return {
        "id": sample.id,
        "epoch": record.pass_,
        "input": sample.prompt,
        "target": sample.reference,
        "messages": [{"role": "user", "content": sample.prompt}, text],
        "output": {
            "model": model,
            "choices": [{"message": text, "stop_reason": _STOPPED[record.finish]}],
            "usage": usage,
            "time": seconds,
        },
        "scores": {
            name: {"value": value, "answer": sample.output} for name, value in sample.scores.items()
        },
        "metadata": {
            "family": record.family,
            "category": record.category,
            "text": stored_prompt.text,
            "verdict": record.verdict and record.verdict.kind,
            "void": record.void,
        },
        "model_usage": {model: usage},
        "total_time": seconds,
        "error": failed or None,
    }


def _lm_eval(run: RunDir, series: Sequence[SampleSeries], folder: Path) -> list[Path]:
    """Write one folder per method, as the harness does per model, with the first repeat only."""
    manifest, config = run.manifest, run.manifest["config"]["effective"]
    created = datetime.fromisoformat(str(manifest["created_utc"]))
    stamp = created.strftime("%Y-%m-%dT%H-%M-%S.%f")
    rows: dict[str, list[SampleSeries]] = {}
    for one in series:
        rows.setdefault(one.row.label, []).append(one)
    files = []
    for label, method_series in rows.items():
        method_folder = folder / _slug(label)
        for one in method_series:
            lines = map(json.dumps, _lm_eval_samples(one, config))
            text = "".join(f"{line}\n" for line in lines)
            files.append(
                _write_file(method_folder / f"samples_{_slug(one.task)}_{stamp}.jsonl", text)
            )
        whole = _lm_eval_results(label, method_series, manifest, created.timestamp())
        files.append(
            _write_file(method_folder / f"results_{stamp}.json", json.dumps(whole, indent=2))
        )
    return files


def _lm_eval_samples(series: SampleSeries, config: Mapping[str, Any]) -> Iterator[dict[str, Any]]:
    settings = {name: config.get(name) for name in _GENERATION}
    settings |= {"max_gen_toks": config.get("max_new_tokens"), "until": []}
    first = [sample for sample in series.samples if sample.record.pass_ == 1]
    for number, sample in enumerate(first):
        stored_prompt = sample.stored_prompt
        doc = {
            "prompt_id": stored_prompt.prompt_id,
            "turn": stored_prompt.turn,
            "family": stored_prompt.family,
            "category": stored_prompt.category,
            "text": stored_prompt.text,
        }
        yield {
            "doc_id": number,
            "doc": doc,
            "target": sample.reference,
            "arguments": {"gen_args_0": {"arg_0": sample.prompt, "arg_1": settings}},
            "resps": [[sample.output]],
            "filtered_resps": [sample.output],
            "filter": "none",
            "metrics": list(sample.scores),
            "doc_hash": _hash(json.dumps(doc, indent=2, ensure_ascii=False)),
            "prompt_hash": _hash(sample.prompt),
            "target_hash": _hash(sample.reference),
            **sample.scores,
        }


def _lm_eval_results(
    label: str, method_series: Sequence[SampleSeries], manifest: Mapping[str, Any], date: float
) -> dict[str, Any]:
    target = Facts.from_manifest(manifest).target
    counts = {s.task: sum(x.record.pass_ == 1 for x in s.samples) for s in method_series}
    versions = {task["name"]: task.get("version") for task in manifest.get("tasks", ())}
    return {
        "results": {
            s.task: {"alias": s.task, **{f"{name},none": mean for name, mean in s.means.items()}}
            for s in method_series
        },
        "configs": {
            s.task: {
                "task": s.task,
                "output_type": "generate_until",
                "metric_list": [{"metric": name, "aggregation": "mean"} for name in s.means],
                "repeats": 1,
                "num_fewshot": 0,
            }
            for s in method_series
        },
        "versions": {s.task: versions.get(s.task) for s in method_series},
        "n-shot": {s.task: 0 for s in method_series},
        "n-samples": {task: {"original": n, "effective": n} for task, n in counts.items()},
        "config": {
            "model": "specbench",
            "model_args": {
                "pretrained": target,
                "method": method_series[0].row.method,
                **method_series[0].row.params,
            },
            "batch_size": manifest["config"]["effective"].get("batch", 1),
            "random_seed": manifest["config"]["effective"].get("seed"),
        },
        "date": date,
        "model_source": "specbench",
        "model_name": label,
        "model_name_sanitized": _slug(label),
        "specbench": {"version": manifest["version"], **method_series[0].figures},
    }


def _slug(name: str) -> str:
    """Return a file name for a label. A hash keeps names of different labels different."""
    slug = re.sub(r"[^A-Za-z0-9._+-]+", "-", name).strip("-.") or "row"
    slug = slug[:_LONGEST_SLUG]
    return slug if slug == name else f"{slug}-{_hash(name)[:6]}"


def _hash(*words: str) -> str:
    return hashlib.sha256("\0".join(words).encode()).hexdigest()


def _write_file(file: Path, text: str) -> Path:
    file.parent.mkdir(parents=True, exist_ok=True)
    file.write_text(text, encoding="utf-8")
    return file


FORMATS: dict[str, Callable[[RunDir, Sequence[SampleSeries], Path], list[Path]]] = {
    "inspect": _inspect,
    "lm-eval": _lm_eval,
}
"""Format name -> function that writes its files and returns their paths."""

"""Fuzzing of what users write: configs, task files, questions, costs and command lines."""

from __future__ import annotations

import contextlib
import io
import json
import os
from collections.abc import Iterator
from pathlib import Path
from random import Random
from typing import Any

import yaml
from mutate import HOSTILE, bytes_changed, changed, line
from subjects import PARALLEL, REFERENCE, ROOT, Subject

from specbench_cli import app, registry
from specbench_cli.config.load import load
from specbench_cli.config.run import RunConfig
from specbench_cli.config.sources import SettingsLayer
from specbench_cli.measure.costs import Costs
from specbench_cli.plan.plan import make_plan
from specbench_cli.tasks.load import load_task
from specbench_cli.tasks.sample import sample_questions

PLANNED = 0.05
"""Share of the accepted configs for which the run is planned, which looks for models and tasks."""


class Configs(Subject):
    """Fuzz target: a config file, also as a profile."""

    name = "configs"

    def __init__(self, folder: Path) -> None:
        super().__init__(folder)
        profiles = (ROOT / "specbench_cli/config/profiles").glob("*.yaml")
        texts = [file.read_text() for file in sorted(profiles)]
        seeds = [yaml.safe_load(text) for text in texts]
        for seed in seeds:
            seed.pop("without", None)
            seed["methods"] = ["sps" if each == "lossless" else each for each in seed["methods"]]
        rich = {
            "methods": ["sps", {"name": "pld", "label": "far", "params": {"length": 9}}],
            "temperature": 0.8,
            "top_p": 0.9,
            "top_k": 7,
            "verify": "coupled",
            "category": ["qa"],
            "seed": 3,
            "threads": 1,
            "device": "cpu",
            "devices": {"target": "cpu:0", "draft": "cpu:1"},
            "load": "poisson:2",
            "memory_budget": "2GB",
            "grammar": "json",
            "contrast": {"beta": 0.5},
            "prefill_chunk": "64",
            "set": {"sps": {"length": 4}},
            "sweep": {"sps": {"length": [1, 2]}},
            "tune": 4,
            "timeout_per_prompt": 5,
        }
        alone = [
            {"methods": ["sps"], key: value} for key, value in rich.items() if key != "methods"
        ]
        alone.append({"methods": ["sps"], "executor": "ray"})  # which refuses some of the others
        self.seeds = [*seeds, rich, *alone]

    def tried(self, rng: Random) -> str | None:
        file = self.folder / "specbench.yaml"
        written(rng, file, rng.choice(self.seeds))
        config, _ = load(SettingsLayer(), None, methods=registry, env={}, folder=self.folder)
        again = RunConfig.model_validate_json(config.model_dump_json())
        if again != config:
            return "accepted a configuration that cannot be resumed"
        if rng.random() < PLANNED:
            make_plan(config).facts()
        return None


class Tasks(Subject):
    """Fuzz target: a task's YAML file and its questions."""

    name = "tasks"

    def __init__(self, folder: Path) -> None:
        super().__init__(folder)
        cards = [yaml.safe_load(file.read_text()) for file in ROOT.glob("datasets_cfg/*.yaml")]
        row = {"id": 1, "turns": ["A?", "B?"], "category": "qa", "reference": ["a", "b"]}
        rows = [row, {**row, "id": "x", "family": "rag"}, {"question_id": 7, "prompt": "C?"}]
        (self.folder / "own.jsonl").write_text("".join(line(each) + "\n" for each in rows))
        source = {"file": "own.jsonl"}
        self.seeds = [
            card | {"source": source, "rows": 3, "name": f"own{n}"} for n, card in enumerate(cards)
        ]
        for card in self.seeds:
            card.pop("sources", None)

    def tried(self, rng: Random) -> str | None:
        file = self.folder / "own.yaml"
        written(rng, file, rng.choice(self.seeds))
        return impossible(load_task(str(file)).questions, rng)


class Questions(Subject):
    """Fuzz target: a user's task as JSON lines."""

    name = "questions"

    def __init__(self, folder: Path) -> None:
        super().__init__(folder)
        full = {"question_id": 1, "turns": ["A?", "B?"], "category": "qa", "family": "rag"}
        full |= {"cluster": "c", "reference": ["a", ["b", "c"]]}
        self.rows = [full, {"prompt": "Name a prime."}, {"question": "Why?", "id": "why"}]

    def tried(self, rng: Random) -> str | None:
        file, rows = self.folder / "own.jsonl", json.loads(line(self.rows))
        if rng.random() < 0.3:
            data = "".join(line(row) + "\n" for row in rows).encode()
            file.write_bytes(bytes_changed(rng, data))
        else:
            rows = changed(rng, rows, rng.choice([1, 1, 2, 3]))[0]
            file.write_text("".join(line(row) + "\n" for row in rows))
        return impossible(load_task(str(file)).questions, rng)


class CostFiles(Subject):
    """Fuzz target: a file of forward costs."""

    name = "costs"

    def __init__(self, folder: Path) -> None:
        super().__init__(folder)
        point = {"n_tokens": 1, "context": 0, "ns": 1e6, "spread": 0.1, "samples": 9}
        grid = [{**point, "n_tokens": n, "context": at} for n in (1, 8) for at in (0, 64)]
        curve = {"forwards": grid, "prefills": [point, {**point, "n_tokens": 64}], "trees": grid}
        host = {"step": 1e4, "draft": 1e3, "node": 10.0, "points": []}
        self.seed = {
            "schema": 2,
            "version": "0.1.0",
            "created_utc": "2026-01-01T00:00:00+00:00",
            "machine": {"id": "0" * 12, "hardware": {"cpu": "x", "accelerators": []}},
            "models": {"target": {"label": "t", "sha256": "0", "n_layers": 8}},
            "setup": {"device": "cpu", "dtype": "float32", "threads": 2},
            "seed": 0,
            "quietness": {"rounds": 3, "void": 0, "other_cpu": 0.0, "noisy": False},
            "curves": {"target": curve, "draft": curve},
            "host": host,
            "hosts": {"draft": host},
        }

    def tried(self, rng: Random) -> str | None:
        file = self.folder / "costs.json"
        if rng.random() < 0.15:
            file.write_bytes(bytes_changed(rng, line(self.seed).encode()))
        else:
            data = json.loads(line(self.seed))
            file.write_text(line(changed(rng, data, rng.choice([1, 1, 2, 3]))[0]))
        costs = Costs.load(file)
        costs.save(self.folder / "again.json")
        str(costs.label)
        for model in costs.curves:
            curve = costs.curves[model]
            for n in (1, 7, 1000):
                curve.covers(n, 100, tree=True)
                if not curve.ns(n, 100) > 0 or not curve.prefill_ns(n) > 0:
                    return "accepted costs that are no time"
        return None if costs.host_ns(3, 12, method="draft") >= 0 else "accepted a host time below 0"


def _typed(word: str) -> bool:
    """Return True if a shell can pass this word: it has no zero byte."""
    try:
        return b"\0" not in os.fsencode(word)
    except UnicodeEncodeError:
        return False


class Arguments(Subject):
    """Fuzz target: words of a command line, for `run --dry-run` and for commands that read runs."""

    name = "arguments"
    inputs = 60

    RUN = (
        *("-m", "-t", "--target", "--draft", "--limit", "--temperature", "--out", "--config"),
        *("--profile", "--category", "--seed", "--top-p", "--top-k", "--verify", "--batch"),
        *("--max-new-tokens", "--load", "--repeats", "--set", "--sweep", "--tune", "--tune-by"),
        *("--threads", "--device", "--devices", "--dtype", "--in-turn", "--judge", "--isolation"),
        *("--timeout-per-prompt", "--resume", "--raw", "--allow-noise", "--run-code", "--json"),
        *("--plugin", "--force", "--only-pass", "--parent", "--nonsense", "-x", "--"),
    )
    VALUES = (
        *("sps", "pld,suffix", "sps.length=4", "sps.length=1:6:1", "sps.length=1:1e9:1e-9"),
        *("sps.length=", "=", ".", "a.b.c=d", "pld.rule=x", "mini", "embedded", "auto", "cpu"),
        *("cuda:99", "greedy", "coupled", "replay", "1e-40", "1e-320", "1e400", "-1", "0", "3"),
        *("0.5", "1e9", "99999999999999999999", "nan", "inf", "poisson:1e-40", "burst:1:0"),
        *("poisson:", "trace:own.jsonl", "target=cpu:0,draft=cpu:1", "target=", "run", "last"),
        *(".", "/", "~", "gone.yaml", "own.jsonl", "/dev/null", "..", "time", "smoke", "qa"),
        *(each for each in HOSTILE if isinstance(each, str) and _typed(each)),
        "a\udcffb",
    )
    OTHERS = (
        ["report"],
        ["report", "run"],
        ["report", "run", "other"],
        ["report", "run", "--prompt"],
        ["report", "run", "--to"],
        ["report", "run", "--format"],
        ["report", "run", "--also"],
        ["report", "run", "--at"],
        ["report", "run", "--prompt", "mini/1", "--method"],
        ["compare", "run", "run"],
        ["compare", "run", "other", "--tolerance"],
        ["compare", "run", "run", "--fail-on"],
        ["compare", "run", "run", "--to"],
        ["compare", "run", "run", "--save"],
        ["compare", "--over-time", "run"],
        ["export", "run"],
        ["audit", "gone"],
        ["audit", "--plugin"],
        ["init"],
        ["train"],
        ["recommend", "--minutes", "0", "--against"],
        ["recommend", "--minutes", "0", "--task"],
        ["list", "methods"],
        ["list", "tasks"],
        ["list", "models"],
        ["list", "runs"],
        ["predict", "run", "--costs"],
        ["predict", "run", "--set"],
    )
    WRITERS = (
        ["publish", "run", "--to"],
        ["report", "run", "--to", "md,csv,json", "--out"],
        ["compare", "run", "run", "--to", "junit", "--out"],
        ["export", "run", "--lm-eval", "--out"],
        ["export", "run", "--out"],
    )

    def __init__(self, folder: Path) -> None:
        super().__init__(folder)
        for name, run in (("run", REFERENCE), ("other", PARALLEL)):
            (self.folder / name).mkdir()
            (self.folder / name / "manifest.json").write_bytes((run / "manifest.json").read_bytes())
            for file in ("records.jsonl", "prompts.jsonl"):
                few = (run / file).read_text().splitlines()[:8]
                (self.folder / name / file).write_text("".join(f"{each}\n" for each in few))
        (self.folder / "own.jsonl").write_text('{"prompt": "A?"}\n')

    def tried(self, rng: Random) -> str | None:
        which = rng.random()
        if which < 0.7:
            words = ["run", "--dry-run"]
            for _ in range(rng.choice([1, 1, 2, 3])):
                option, value = rng.choice(self.RUN), rng.choice(self.VALUES)
                words += rng.choice([[option, value], [option, value], [option], [value]])
        elif which < 0.9:
            words = [*rng.choice(self.OTHERS)]
            if rng.random() < 0.8:
                words.append(rng.choice(self.VALUES))
        else:
            within = [each for each in self.VALUES if each and each[0] not in "/~.$"]
            words = [*rng.choice(self.WRITERS), rng.choice(within)]
        printed = io.StringIO()
        redirects = contextlib.redirect_stdout(printed), contextlib.redirect_stderr(printed)
        with _inside(self.folder), redirects[0], redirects[1]:
            code = app._run(words)
        if code == 4 or "Traceback" in printed.getvalue():
            return f"a bug is said: {printed.getvalue()[-300:]!r} of {words}"
        return None


@contextlib.contextmanager
def _inside(folder: Path) -> Iterator[None]:
    """Work in the folder, and restore its content afterwards."""
    before, held = Path.cwd(), set(folder.rglob("*"))
    os.chdir(folder)
    try:
        yield
    finally:
        os.chdir(before)
        for each in sorted(set(folder.rglob("*")) - held, reverse=True):
            each.rmdir() if each.is_dir() and not each.is_symlink() else each.unlink()


def written(rng: Random, file: Path, seed: Any) -> None:
    """Write a YAML file made from a seed, with changed values or bytes."""
    if rng.random() < 0.3:
        file.write_bytes(bytes_changed(rng, yaml.safe_dump(seed, sort_keys=False).encode()))
        return
    data = changed(rng, json.loads(line(seed)), rng.choice([1, 1, 2, 3]))[0]
    if rng.random() < 0.5:
        text = line(data)
    else:
        text = yaml.safe_dump(data, sort_keys=False, allow_unicode=rng.random() < 0.5)
    file.write_bytes(text.encode("utf-8", "surrogatepass"))


def impossible(questions: list[Any], rng: Random) -> str | None:
    """Return what is wrong with accepted questions: a value that no run could store."""
    sample_questions(questions, rng.randint(1, 5), 0)
    for each in questions:
        if not each.turns or not all(turn.strip() for turn in each.turns):
            return "accepted a question without a word"
        for word in (each.prompt_id, each.cluster, each.category, *each.turns):
            try:
                word.encode()
            except UnicodeEncodeError:
                return "accepted a lone surrogate"
        for word in (each.prompt_id, each.category):
            if any(ord(char) < 32 or 127 <= ord(char) < 160 for char in word):
                return "accepted a control character in a name"
    return None

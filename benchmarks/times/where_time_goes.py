"""Where the time goes, held against measurements by the program's own commands. On a quiet machine:

    python benchmarks/times/where_time_goes.py predicted --limit 96
    python benchmarks/times/where_time_goes.py predicted --limit 24 --target smollm2-135m
    python benchmarks/times/where_time_goes.py elsewhere  # of 2 threads, for 1
    python benchmarks/times/where_time_goes.py beside --task gsm8k --limit 48
    python benchmarks/times/where_time_goes.py recommended --minutes 10

predicted: vanilla, sps with K = 1 to 10, pld, staged, eagle2: predicted over measured, and K = 1 to
10 by the trace of K = 5 alone; costs are probed between the run's prompts, in --rounds. elsewhere:
the trace of K = 5 on 2 threads and one thread's costs, over what one thread measures. beside: our
rows' tokens/s over those of another engine (--engine) on the same prompts. recommended: three
seeds, and whether each one's choice shares a letter with the best of the table of all that was
searched: --limit is of that table.

What is made lies in --out; what is there already is not measured again, what was begun is ended.
`mini` has 480 questions, too many for SmolLM2: --limit.
--methods leaves out what a target has no draft or head for (SmolLM2: --methods vanilla,pld).
"""

# ruff: noqa: T201

from __future__ import annotations

import argparse
import json
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import yaml

FIRST, LAST, TRACED = 1, 10, 5
LENGTHS = f"sps.length={FIRST}:{LAST}:1"
SEEDS = (0, 1, 2)

Words = list[str]


def specbench(*words: str | Path) -> list[dict[str, Any]]:
    """What a command prints as JSON, an object a line. Raises SystemExit where it fails."""
    told = [sys.executable, "-m", "specbench_cli", *map(str, words)]
    print("$ specbench", *words, file=sys.stderr, flush=True)
    said = subprocess.run(told, stdout=subprocess.PIPE, text=True, check=False)
    if said.returncode:
        raise SystemExit(f"error: {' '.join(told)} ended with {said.returncode}")
    return [json.loads(line) for line in said.stdout.splitlines()]


class Place:
    """A folder of runs and costs, of one pair of models.

    Args:
        asked: the arguments.
    """

    def __init__(self, asked: argparse.Namespace) -> None:
        self.folder: Path = asked.out / asked.target.replace("/", "-")
        self.folder.mkdir(parents=True, exist_ok=True)
        pair = ["--target", asked.target, *(["--draft", asked.draft] if asked.draft else [])]
        self.models: Words = [*pair, *(["--allow-noise"] if asked.allow_noise else [])]
        self.task: Words = ["--task", asked.task, "--max-new-tokens", str(asked.max_new_tokens)]
        limit: Words = ["--limit", str(asked.limit)] if asked.limit else []
        self.prompts: Words = [*self.task, *limit]
        self.probe: Words = ["--probe", str(asked.rounds)]

    def run(self, name: str, methods: Words, threads: int, *more: str | Path) -> Path:
        """A run's folder."""
        path = self.folder / name
        if not (path / "summary.csv").exists():
            words = ["-m", ",".join(methods), "--threads", str(threads), *self.models]
            self.made("run", path, *words, *self.prompts, *more)
        return path

    def made(self, command: str, path: Path, *words: str | Path) -> None:
        """Have a folder made; one that was begun is gone on with."""
        if path.exists():
            specbench(command, "--resume", path, "--json")
        else:
            specbench(command, *words, "--out", path, "--json")


def over_all(rows: list[dict[str, Any]]) -> Iterator[dict[str, Any]]:
    """A row a method: over all tasks where there are several."""
    yield from {row["label"]: row for row in rows if row["label"] != "all"}.values()


def show(name: str, found: float | None, measured: float | None) -> None:
    """A line: what was predicted in seconds, what was measured, and their ratio."""
    if not found or not measured:
        print(f"{name:18} {'-':>10} {'-':>10} {'-':>7}")
        return
    print(f"{name:18} {found / 1e9:10.3f} {measured / 1e9:10.3f} {found / measured:7.3f}")


def heading(what: str) -> None:
    print(f"\n{what}\n{'':18} {'predicted':>10} {'measured':>10} {'ratio':>7}")


def settings(run: Path, row: str, *by: str | Path) -> list[dict[str, Any]]:
    """K = 1 to 10 by the trace of one row, modelled."""
    (said,) = specbench("predict", run, "--sweep", LENGTHS, "--row", row, *by, "--json")
    rows: list[dict[str, Any]] = said["modelled"]
    return rows


def predicted(asked: argparse.Namespace) -> None:
    """Done when: within 10% of measured, 5% on settings that were held out; efficiency 0.9."""
    place, methods, threads = Place(asked), asked.methods.split(","), asked.threads
    drafts = "sps" in methods
    swept = ["--sweep", LENGTHS] if drafts else []
    run = place.run("run", methods, threads, *place.probe, *swept)
    (said,) = specbench("predict", run, "--json")
    heading(f"{asked.target}, {threads} threads; costs probed between the prompts")
    for row in over_all(said["rows"]):
        show(row["label"], row["predicted"], row["measured"])
    for label, why in said["missing"].items():
        print(f"{label}: no prediction: {why}")
    if drafts:
        heading(f"by the trace of K={TRACED} alone")
        for row in settings(run, f"sps length={TRACED}"):
            show(row["label"], row["decode"], row["measured"])


def elsewhere(asked: argparse.Namespace) -> None:
    """Done when: from a trace of 2 threads at K=5, one thread and K = 1 to 10."""
    place = Place(asked)
    traced = place.run("traced", ["sps"], 2, "--set", f"sps.length={TRACED}")
    run = place.run("one-thread", ["sps"], 1, *place.probe, "--sweep", LENGTHS)
    (said,) = specbench("predict", run, "--json")
    measured = {row["label"]: row for row in over_all(said["rows"])}
    heading(f"{asked.target}: K={TRACED} of 2 threads tells of 1 thread")
    for row in settings(traced, "sps", "--costs", run / "costs-1.json"):
        own = measured.get(row["label"], {})
        show(row["label"], row["decode"], None if own.get("void") else own.get("measured"))


def beside(asked: argparse.Namespace) -> None:
    """Done when: plain decoding at 0.85 times of the other's tokens/s, with a draft at 1."""
    place, engine = Place(asked), asked.engine
    pairs = {"vanilla": engine, "sps": f"{engine}-draft", "pld": f"{engine}-lookup"}
    ours = [name for name in pairs if name in asked.methods.split(",")]
    rows = [*ours, *(pairs[name] for name in ours)]
    run = place.run(engine.replace(":", "-"), rows, asked.threads)
    found = {row["method"]: row for row in specbench("report", run, "--json")[: len(rows)]}
    print(f"\n{'':10} {'ours tok/s':>11} {'theirs':>8} {'ratio':>6}  output")
    for name in ours:
        own, their = found[name]["tokens_per_s"], found[pairs[name]]
        if their["tokens_per_s"] is None:
            print(f"{name:10} {own:11.1f} {'-':>8} {'-':>6}  {pairs[name]} failed")
            continue
        ratio = own / their["tokens_per_s"]
        print(f"{name:10} {own:11.1f} {their['tokens_per_s']:8.1f} {ratio:6.2f}  {their['output']}")


def recommended(asked: argparse.Namespace) -> None:
    """Done when: three seeds choose the same, or rows that share a letter with the best one."""
    place, chosen, searched = Place(asked), {}, set()
    for seed in SEEDS:
        folder = place.folder / f"recommended-{seed}"
        done = folder / "recommendation.json"
        if not done.exists():
            words = ["--minutes", str(asked.minutes), "--seed", str(seed), "--batches", "0"]
            words += ["--threads", str(asked.threads), *place.models, *place.task]
            place.made("recommend", folder, *words)
        said = json.loads(done.read_text(encoding="utf-8"))
        chosen[seed] = said["recommended"] or said["confirmed"][0]
        searched |= {each["method"] for each in said["search"]}
        word = "recommended" if said["recommended"] else f"none, {said['why']}; fastest"
        print(f"seed {seed}: {word} {chosen[seed]['label']}, {chosen[seed]['speedup']}")
    rows: dict[str, dict[str, Any]] = {name: {"name": name} for name in sorted(searched)}
    for each in chosen.values():
        rows[each["label"]] = {
            "name": each["method"], "label": each["label"], "params": each["set"]
        }  # fmt: skip
    config = place.folder / "table.yaml"
    config.write_text(yaml.safe_dump({"methods": list(rows.values())}), encoding="utf-8")
    run = place.folder / "table"
    if not (run / "summary.csv").exists():
        words = ["--threads", str(asked.threads), *place.models, *place.prompts]
        place.made("run", run, "--config", config, *words)
    table = [row for row in specbench("report", run, "--json") if row["family"] == "all"]
    ranked = [row for row in table if row["group"]]
    best = max(ranked, key=lambda row: row["speedup"])
    print(f"\nbest of the table: {best['method']}, {best['speedup']:.3f}x, {best['group']}")
    for seed, each in chosen.items():
        own = next(row for row in table if row["method"] == each["label"])
        shares = bool(set(own["group"]) & set(best["group"]))
        word = "shares a letter with it" if shares else "does not"
        print(f"seed {seed}: {own['method']}, {own['speedup']:.3f}x, {own['group']}: {word}")


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    kinds = {each.__name__: each for each in (predicted, elsewhere, beside, recommended)}
    parser.add_argument("what", choices=kinds)
    parser.add_argument("--target", default="embedded")
    parser.add_argument("--draft", help="default: the target's")
    parser.add_argument("--methods", default="vanilla,sps,pld,staged,eagle2")
    parser.add_argument("--task", default="mini")
    parser.add_argument("--limit", type=int, help="default: the task's questions")
    parser.add_argument("--max-new-tokens", type=int, default=64)
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--rounds", type=int, default=24, help="times of each point of a probe")
    parser.add_argument("--engine", default="engine:openvino", help="of `beside`")
    parser.add_argument("--minutes", type=float, default=10, help="of each recommendation")
    parser.add_argument("--allow-noise", action="store_true", help="of a dry run: not to be kept")
    parser.add_argument("--out", type=Path, default=Path("results/runs/where-time-goes"))
    asked = parser.parse_args()
    kinds[asked.what](asked)


if __name__ == "__main__":
    main()

"""Compare predictions and recommendations of specbench with measurements, on a quiet machine.

    python benchmarks/times/where_time_goes.py predicted --limit 96
    python benchmarks/times/where_time_goes.py predicted --limit 24 --target smollm2-135m
    python benchmarks/times/where_time_goes.py elsewhere  # 2 threads predict 1
    python benchmarks/times/where_time_goes.py beside --task gsm8k --limit 48
    python benchmarks/times/where_time_goes.py recommended --minutes 10

predicted: predicted over measured time of vanilla, sps with K = 1 to 10, pld, staged and eagle2,
and of K = 1 to 10 from the trace of K = 5 alone. Costs are probed between the prompts, in --rounds.
elsewhere: time predicted from the trace of K = 5 on 2 threads and the costs of one thread, over the
time measured on one thread. beside: tokens/s of specbench's methods over those of another engine
(--engine) on the same prompts. recommended: recommendations of three seeds, and whether each is in
the same significance group as the best method of a run of all candidates (--limit applies to it).

Runs are stored in --out. Finished runs are not repeated, and interrupted ones are resumed. `mini`
has
480 questions, too many for SmolLM2: use --limit. Use --methods to leave out methods without a draft
or head for the target (SmolLM2: --methods vanilla,pld).
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

MIN_LENGTH, MAX_LENGTH, TRACED_LENGTH = 1, 10, 5
LENGTHS = f"sps.length={MIN_LENGTH}:{MAX_LENGTH}:1"
SEEDS = (0, 1, 2)

Words = list[str]


def specbench(*words: str | Path) -> list[dict[str, Any]]:
    """Run a command and return its JSON output, one object per line.

    Raises:
        SystemExit: the command fails.
    """
    command_line = [sys.executable, "-m", "specbench_cli", *map(str, words)]
    print("$ specbench", *words, file=sys.stderr, flush=True)
    result = subprocess.run(command_line, stdout=subprocess.PIPE, text=True, check=False)
    if result.returncode:
        raise SystemExit(f"error: {' '.join(command_line)} ended with {result.returncode}")
    return [json.loads(line) for line in result.stdout.splitlines()]


class RunFolder:
    """A folder of runs and costs of one pair of models.

    Args:
        args: the parsed arguments.
    """

    def __init__(self, args: argparse.Namespace) -> None:
        self.path: Path = args.out / args.target.replace("/", "-")
        self.path.mkdir(parents=True, exist_ok=True)
        pair = ["--target", args.target, *(["--draft", args.draft] if args.draft else [])]
        self.models: Words = [*pair, *(["--allow-noise"] if args.allow_noise else [])]
        self.task: Words = ["--task", args.task, "--max-new-tokens", str(args.max_new_tokens)]
        limit: Words = ["--limit", str(args.limit)] if args.limit else []
        self.prompts: Words = [*self.task, *limit]
        self.probe: Words = ["--probe", str(args.rounds)]

    def run(self, name: str, methods: Words, threads: int, *more: str | Path) -> Path:
        """Return the folder of a run; start or resume it if it is not finished."""
        path = self.path / name
        if not (path / "summary.csv").exists():
            words = ["-m", ",".join(methods), "--threads", str(threads), *self.models]
            self.ensure("run", path, *words, *self.prompts, *more)
        return path

    def ensure(self, command: str, path: Path, *words: str | Path) -> None:
        """Run a command that writes a folder, or resume it if the folder exists."""
        if path.exists():
            specbench(command, "--resume", path, "--json")
        else:
            specbench(command, *words, "--out", path, "--json")


def one_row_per_method(rows: list[dict[str, Any]]) -> Iterator[dict[str, Any]]:
    """Yield one prediction per method: that over all tasks if the run has several tasks."""
    yield from {row["label"]: row for row in rows if row["label"] != "all"}.values()


def print_ratio(name: str, found: float | None, measured: float | None) -> None:
    """Print predicted and measured seconds, and their ratio."""
    if not found or not measured:
        print(f"{name:18} {'-':>10} {'-':>10} {'-':>7}")
        return
    print(f"{name:18} {found / 1e9:10.3f} {measured / 1e9:10.3f} {found / measured:7.3f}")


def print_heading(what: str) -> None:
    print(f"\n{what}\n{'':18} {'predicted':>10} {'measured':>10} {'ratio':>7}")


def predict_lengths(run: Path, row: str, *by: str | Path) -> list[dict[str, Any]]:
    """Return predictions for K = 1 to 10 from the trace of one method."""
    (result,) = specbench("predict", run, "--sweep", LENGTHS, "--row", row, *by, "--json")
    rows: list[dict[str, Any]] = result["modelled"]
    return rows


def check_predictions(args: argparse.Namespace) -> None:
    """Compare predictions with measurements. Goal: within 10%, 5% on held-out settings."""
    runs, methods, threads = RunFolder(args), args.methods.split(","), args.threads
    drafts = "sps" in methods
    swept = ["--sweep", LENGTHS] if drafts else []
    run = runs.run("run", methods, threads, *runs.probe, *swept)
    (result,) = specbench("predict", run, "--json")
    print_heading(f"{args.target}, {threads} threads; costs probed between the prompts")
    for row in one_row_per_method(result["rows"]):
        print_ratio(row["label"], row["predicted"], row["measured"])
    for label, why in result["missing"].items():
        print(f"{label}: no prediction: {why}")
    if drafts:
        print_heading(f"by the trace of K={TRACED_LENGTH} alone")
        for row in predict_lengths(run, f"sps length={TRACED_LENGTH}"):
            print_ratio(row["label"], row["decode"], row["measured"])


def check_other_threads(args: argparse.Namespace) -> None:
    """Compare predictions for one thread, from a trace on 2 threads, with measurements."""
    runs = RunFolder(args)
    traced = runs.run("traced", ["sps"], 2, "--set", f"sps.length={TRACED_LENGTH}")
    run = runs.run("one-thread", ["sps"], 1, *runs.probe, "--sweep", LENGTHS)
    (result,) = specbench("predict", run, "--json")
    measured = {row["label"]: row for row in one_row_per_method(result["rows"])}
    print_heading(f"{args.target}: K={TRACED_LENGTH} of 2 threads predicts 1 thread")
    for row in predict_lengths(traced, "sps", "--costs", run / "costs-1.json"):
        own = measured.get(row["label"], {})
        print_ratio(row["label"], row["decode"], None if own.get("void") else own.get("measured"))


def compare_engines(args: argparse.Namespace) -> None:
    """Compare tokens/s with another engine. Goal: 0.85 of it for vanilla, 1 with a draft."""
    runs, engine = RunFolder(args), args.engine
    pairs = {"vanilla": engine, "sps": f"{engine}-draft", "pld": f"{engine}-lookup"}
    ours = [name for name in pairs if name in args.methods.split(",")]
    rows = [*ours, *(pairs[name] for name in ours)]
    run = runs.run(engine.replace(":", "-"), rows, args.threads)
    found = {row["method"]: row for row in specbench("report", run, "--json")[: len(rows)]}
    print(f"\n{'':10} {'ours tok/s':>11} {'theirs':>8} {'ratio':>6}  output")
    for name in ours:
        own, their = found[name]["tokens_per_s"], found[pairs[name]]
        if their["tokens_per_s"] is None:
            print(f"{name:10} {own:11.1f} {'-':>8} {'-':>6}  {pairs[name]} failed")
            continue
        ratio = own / their["tokens_per_s"]
        print(f"{name:10} {own:11.1f} {their['tokens_per_s']:8.1f} {ratio:6.2f}  {their['output']}")


def check_recommendations(args: argparse.Namespace) -> None:
    """Compare the recommendations of three seeds. Goal: each is as good as the best method."""
    runs, chosen, searched = RunFolder(args), {}, set()
    for seed in SEEDS:
        folder = runs.path / f"recommended-{seed}"
        done = folder / "recommendation.json"
        if not done.exists():
            words = ["--minutes", str(args.minutes), "--seed", str(seed), "--batches", "0"]
            words += ["--threads", str(args.threads), *runs.models, *runs.task]
            runs.ensure("recommend", folder, *words)
        result = json.loads(done.read_text(encoding="utf-8"))
        chosen[seed] = result["recommended"] or result["confirmed"][0]
        searched |= {each["method"] for each in result["search"]}
        verdict = "recommended" if result["recommended"] else f"none, {result['why']}; fastest"
        print(f"seed {seed}: {verdict} {chosen[seed]['label']}, {chosen[seed]['speedup']}")
    rows: dict[str, dict[str, Any]] = {name: {"name": name} for name in sorted(searched)}
    for each in chosen.values():
        rows[each["label"]] = {
            "name": each["method"], "label": each["label"], "params": each["set"]
        }  # fmt: skip
    config = runs.path / "table.yaml"
    config.write_text(yaml.safe_dump({"methods": list(rows.values())}), encoding="utf-8")
    run = runs.path / "table"
    if not (run / "summary.csv").exists():
        words = ["--threads", str(args.threads), *runs.models, *runs.prompts]
        runs.ensure("run", run, "--config", config, *words)
    table = [row for row in specbench("report", run, "--json") if row["family"] == "all"]
    ranked = [row for row in table if row["group"]]
    best = max(ranked, key=lambda row: row["speedup"])
    print(f"\nbest of the table: {best['method']}, {best['speedup']:.3f}x, {best['group']}")
    for seed, each in chosen.items():
        own = next(row for row in table if row["method"] == each["label"])
        shares = bool(set(own["group"]) & set(best["group"]))
        verdict = "shares a group with it" if shares else "does not"
        print(f"seed {seed}: {own['method']}, {own['speedup']:.3f}x, {own['group']}: {verdict}")


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    commands = {
        "predicted": check_predictions,
        "elsewhere": check_other_threads,
        "beside": compare_engines,
        "recommended": check_recommendations,
    }
    parser.add_argument("what", choices=commands)
    parser.add_argument("--target", default="embedded")
    parser.add_argument("--draft", help="default: the target's draft model")
    parser.add_argument("--methods", default="vanilla,sps,pld,staged,eagle2")
    parser.add_argument("--task", default="mini")
    parser.add_argument("--limit", type=int, help="default: the task's questions")
    parser.add_argument("--max-new-tokens", type=int, default=64)
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--rounds", type=int, default=24, help="repetitions of each probed point")
    parser.add_argument("--engine", default="engine:openvino", help="engine of `beside`")
    parser.add_argument("--minutes", type=float, default=10, help="time of each recommendation")
    parser.add_argument("--allow-noise", action="store_true", help="for dry runs only")
    parser.add_argument("--out", type=Path, default=Path("results/runs/where-time-goes"))
    args = parser.parse_args()
    commands[args.what](args)


if __name__ == "__main__":
    main()

"""Check specbench on one GPU, and write the results as one JSON and one Markdown file.

    python benchmarks/device.py --out DIR                # the whole check: at most nine minutes
    python benchmarks/device.py --out DIR --device cpu   # a rehearsal on small shapes

The machine needs torch and specbench's dependencies, no download and no installation: run it from
the root of a checkout. Steps, in order of importance:

1. `pytest -m gpu`: every method takes the same steps on the GPU as on the CPU, without extra syncs.
2. Methods on the shipped models: verdicts, speedups and memory at batch 1 and 8.
3. A 7B shape with random weights (bfloat16, imposed acceptance): throughput at batch 1, 8 and 32.
4. Forward time by rows, against memory bandwidth, and the launch share of a 68M draft.

Each step has a time limit. If a step fails or exceeds it, the report says so and the next step
starts.
"""

# ruff: noqa: T201

from __future__ import annotations

import argparse
import json
import os
import platform
import subprocess
import sys
import time
from pathlib import Path
from typing import Any, NamedTuple

ROOT = Path(__file__).resolve().parents[1]
ROWS = "benchmarks/times/forward_rows.py"

COLUMNS = {
    "label": "method",
    "tokens_per_s": "tokens/s",
    "decode_speedup": "decode speedup",
    "mat": "MAT",
    "share_target": "target",
    "share_draft": "draft",
    "share_host": "host",
    "identical": "identical",
    "near_tie": "near-tie",
    "mismatch": "mismatch",
    "failed": "failed",
    "peak_bytes": "peak GB",
}
"""Keys of a run's summary, and the headings of the Markdown table."""


class CheckStep(NamedTuple):
    """One command of the check.

    arguments: arguments of `python`. limit: time limit in seconds. run: True for a command
    `specbench run --json`, whose last output line is a summary.
    """

    name: str
    arguments: list[str]
    limit: float
    run: bool = False


def steps(device: str, out: Path) -> list[CheckStep]:
    """Return the commands for a device, the most important first."""
    gpu = device != "cpu"
    target, draft = ("llama-2-7b", "llama-68m") if gpu else ("tiny-4m", "tiny-1m")
    dtype = "bfloat16" if gpu else "float32"
    found = []
    if gpu:
        tests = ["tests/device/test_steps.py", "tests/measure/test_memory.py"]
        found.append(
            CheckStep(
                "tests",
                ["-m", "pytest", "-m", "gpu", "-n", "8", "-q", "-p", "no:benchmark", *tests],
                180,
            )
        )

    def run(name: str, limit: float, *options: str) -> CheckStep:
        place = ["--device", device, "--allow-noise", "--out", str(out / name.replace(" ", "-"))]
        return CheckStep(
            name, ["-m", "specbench_cli", "run", *options, *place, "--json"], limit, True
        )

    heads = ["-m", "sps,pld,suffix,eagle2,eagle3,sps-tree,mtp", "--limit", "16" if gpu else "6"]
    shape = ["--target", f"shape:{target}", "--draft", f"shape:{draft}", "--acceptance", "0.8"]
    shape += ["-m", "sps,pld", "--dtype", dtype, "--max-new-tokens", "64" if gpu else "16"]
    for batch in (1, 8):
        found.append(run(f"embedded batch {batch}", 90, *heads, "--batch", str(batch)))
    for batch in (1, 8, 32):
        size = ["--batch", str(batch), "--limit", str(max(8, batch))]
        found.append(run(f"{target} batch {batch}", 90, *shape, *size))
    rows = [ROWS, f"shape:{target}", "--dtype", dtype, "--device", device]
    found.append(CheckStep(f"{target} rows", rows, 60))
    chain = [ROWS, f"shape:{draft}", "--dtype", dtype, "--device", device, "--steps"]
    if gpu:
        found.append(CheckStep(f"{draft} draft step", chain, 60))
    return found


def main() -> None:
    """Run all steps and write device.json and device.md; exit with 1 if a step failed."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--out", type=Path, required=True, help="folder for the two files")
    parser.add_argument("--device", default="cuda", help="cuda, or cpu for a rehearsal")
    parser.add_argument("--minutes", type=float, default=9, help="time limit of the whole check")
    args = parser.parse_args()
    args.out.mkdir(parents=True, exist_ok=True)
    end = time.monotonic() + 60 * args.minutes
    report: dict[str, Any] = {"machine": describe_machine(args.device), "steps": []}
    runs = args.out.resolve() / "runs"
    for step in steps(args.device, runs):
        limit = min(step.limit, end - time.monotonic())
        report["steps"].append(outcome := run_step(step, limit))
        print(f"{step.name}: {outcome['result']}, {outcome['seconds']:.0f} s", flush=True)
        # Write after every step, in case the machine is released before the end.
        (args.out / "device.json").write_text(json.dumps(report, indent=1) + "\n")
        (args.out / "device.md").write_text(format_markdown(report))
    sys.exit(any(step["result"] != "passed" for step in report["steps"]))


def describe_machine(device: str) -> dict[str, str]:
    """Return the facts that the results depend on: GPU, driver, versions, commit."""
    import torch

    facts = {"torch": torch.__version__, "python": platform.python_version()}
    facts |= {"cpus": str(os.cpu_count()), "commit": output(["git", "rev-parse", "HEAD"])}
    if device != "cpu":
        query = ["nvidia-smi", "--query-gpu=name,driver_version", "--format=csv,noheader"]
        facts |= {"gpu": output(query), "cuda": str(torch.version.cuda)}
    return facts


def output(command: list[str]) -> str:
    """Return the output of a command, or "unknown" if it fails."""
    try:
        return subprocess.run(
            command, cwd=ROOT, check=True, capture_output=True, text=True, timeout=20
        ).stdout.strip()
    except (OSError, subprocess.SubprocessError):
        return "unknown"


def run_step(step: CheckStep, limit: float) -> dict[str, Any]:
    """Run one step and return its result, its time in seconds, and its summary or printed text."""
    if limit < 5:
        return {"name": step.name, "result": "no time left", "seconds": 0.0}
    command = [sys.executable, *([] if step.arguments[0] == "-m" else ["-P"]), *step.arguments]
    path = os.pathsep.join(filter(None, [str(ROOT), os.environ.get("PYTHONPATH")]))
    environment = {**os.environ, "PYTHONPATH": path, "HF_HUB_OFFLINE": "1"}
    start = time.monotonic()
    try:
        done = subprocess.run(
            command,
            cwd=ROOT,
            env=environment,
            capture_output=True,
            text=True,
            timeout=limit,
            check=False,
        )
        result = "passed" if done.returncode == 0 else f"exit code {done.returncode}"
        printed, errors = done.stdout, done.stderr
    except subprocess.TimeoutExpired as late:
        result = f"over {limit:.0f} s"
        printed, errors = (
            part.decode(errors="replace") if isinstance(part, bytes) else part or ""
            for part in (late.stdout, late.stderr)
        )
    found = {"name": step.name, "result": result, "seconds": time.monotonic() - start}
    found["command"] = " ".join(["python", *step.arguments]).replace(str(ROOT), ".")
    if step.run and result == "passed":
        done_event = json.loads(printed.splitlines()[-1])
        found["summary"] = [
            {key: line[key] for key in COLUMNS}
            for line in done_event["summary"]
            if line["family"] == "all"
        ]
    else:
        found["printed"] = printed[-6000:]
        found["errors"] = errors[-3000:] if result != "passed" else ""
    return found


def format_markdown(report: dict[str, Any]) -> str:
    """Return the report as a Markdown page: the machine, then a section for each step."""
    lines = ["# Device check", ""]
    lines += [f"- {name}: {value}" for name, value in report["machine"].items()]
    for step in report["steps"]:
        lines += ["", f"## {step['name']}", ""]
        lines += [f"`{step['command']}`: " if "command" in step else ""]
        lines[-1] += f"{step['result']}, {step['seconds']:.0f} s"
        if "summary" in step:
            lines += ["", f"| {' | '.join(COLUMNS.values())} |", "| --- " * len(COLUMNS) + "|"]
            lines += [f"| {' | '.join(format_cells(line))} |" for line in step["summary"]]
        elif text := (step.get("printed", "") + step.get("errors", "")).strip():
            lines += ["", "```text", text, "```"]
    return "\n".join(lines) + "\n"


def format_cells(line: dict[str, Any]) -> list[str]:
    """Return a summary line as table cells, in the order of COLUMNS."""
    shown = []
    for key in COLUMNS:
        value = line[key]
        if key == "peak_bytes" and value is not None:
            value /= 1e9
        shown.append(
            "" if value is None else f"{value:.2f}" if isinstance(value, float) else str(value)
        )
    return shown


if __name__ == "__main__":
    main()

"""Synthetic runs with any number of prompts, methods and repeats, by fixed seeds.

    python tests/scale/synthetic.py FOLDER --prompts 480 --rows 45 --passes 9

The records are valid: their counters agree, and their times vary by prompt and method.
"""

from __future__ import annotations

import argparse
import json
from collections.abc import Iterator
from pathlib import Path
from random import Random

from specbench_cli.store.run_dir import Prompt, RunDir
from specbench_cli.store.schema import (
    FAMILIES,
    ForwardKind,
    Ns,
    Params,
    Record,
    Steps,
    Trace,
    Verdict,
    to_json,
)

TOKENS = 48
VOCABULARY = 4096
_TARGET = ForwardKind("target", "prefill", 0, 1, (0, 8))
_VERIFY = ForwardKind("target", "verify", 0, 1, (0, 8))
_DRAFT = ForwardKind("draft", "draft", 0, 1, (0, 2))


def write(folder: Path, prompts: int, rows: int, passes: int, status: str = "finished") -> RunDir:
    """Write a run of `prompts` x `rows` x `passes` records; `rows` is the number of methods."""
    labels = ["vanilla", *(f"sps-{number}" for number in range(1, rows))]
    run = RunDir.create(folder, _manifest(labels, prompts))
    prompt_list = [_prompt(number) for number in range(prompts)]
    run.append_prompts(prompt_list)
    with (folder / "records.jsonl").open("w", encoding="utf-8") as file:
        for record in _records(prompt_list, labels, passes):
            file.write(to_json(record) + "\n")
    run.update(status=status)
    return run


def _records(prompt_list: list[Prompt], labels: list[str], passes: int) -> Iterator[Record]:
    for number in range(1, passes + 1):
        for prompt in prompt_list:
            rng = Random(f"{prompt.prompt_id} {number}")
            forward_ns = rng.randint(1_000_000, 2_000_000)
            for place, label in enumerate(labels):
                yield _record(prompt, label, place, number, forward_ns, rng)


def _prompt(number: int) -> Prompt:
    family = FAMILIES[number % 6]
    name = f"mini/{family}-{number:05d}"
    return Prompt(name, name, "mini", family, family, 1, f"Question {number}?", [5, number % 4096])


def _record(
    prompt: Prompt, label: str, place: int, number: int, forward_ns: int, rng: Random
) -> Record:
    steps, origin, trace = Steps(), ["prefill"], Trace([_TARGET, _VERIFY, _DRAFT])
    now = 0

    def forward(kind: int, n: int, ns: int) -> None:
        nonlocal now
        trace.kind.append(kind)
        trace.n_tokens.append(n)
        trace.t0_ns.append(now)
        now += ns
        trace.t1_ns.append(now)

    forward(0, 20, 4 * forward_ns)
    prefill = now
    length = 0 if place == 0 else 1 + place % 6
    while len(origin) < TOKENS:
        for _ in range(length):
            forward(2, 1, forward_ns // 10)
        forward(1, length + 1, forward_ns + rng.randrange(forward_ns // 10))
        accepted = min(length, TOKENS - 1 - len(origin), rng.randrange(length + 1))
        words = ["accepted"] * accepted
        words.append("plain" if length == 0 else "bonus" if accepted == length else "recovered")
        steps.levels.append(length)
        steps.nodes.append(length)
        steps.tested.append(min(length, accepted + 1))
        steps.accepted.append(accepted)
        steps.committed.append(len(words))
        origin += words
    ns_by_kind = dict.fromkeys((0, 1, 2), 0)
    for kind, t0, t1 in zip(trace.kind, trace.t0_ns, trace.t1_ns, strict=True):
        ns_by_kind[kind] += t1 - t0
    drafted = length * len(steps.levels)
    return Record(
        prompt_id=prompt.prompt_id,
        cluster=prompt.cluster,
        task=prompt.task,
        family=prompt.family,
        category=prompt.category,
        turn=1,
        method="sps" if place else "vanilla",
        label=label,
        peer=False,
        params=Params({}, {"length": length} if place else {}, "default"),
        sampling="greedy",
        guarantee="exact_tokens",
        pass_=number,
        seed=0,
        output_ids=[(17 * at + prompt.ids[1]) % VOCABULARY for at in range(TOKENS)],
        origin=origin,
        n_tokens=TOKENS,
        finish="length",
        steps=steps,
        target_forwards=1 + len(steps.levels),
        draft_forwards=drafted,
        target_equivalents=float(1 + len(steps.levels)),
        forwards=trace,
        ns=Ns(now, prefill, now - prefill, ns_by_kind[2], ns_by_kind[1], 0),
        peak_bytes=10**8,
        other_cpu=0.0,
        verdict=Verdict("identical" if place else "reference"),
        score=None,
        void=False,
        error=None,
    )


def _manifest(labels: list[str], prompts: int) -> dict[str, object]:
    weights = {"vocab_size": VOCABULARY, "n_layers": 8, "sha256": "0" * 64, "weight_bytes": 1}
    return {
        "schema": 6,
        "version": "0.1.0",
        "created_utc": "2026-01-01T00:00:00+00:00",
        "config": {"effective": {"seed": 0, "verify": "greedy", "temperature": 0.0}},
        "machine": {"id": "0" * 12},
        "models": {"target": {"label": "synthetic", **weights}},
        "heads": {},
        "rows": [{"label": label, "timing_free": True, "uses": []} for label in labels],
        "tasks": [{"name": "mini", "version": "2", "sha256": "0" * 64, "n_questions": prompts}],
        "noisy": False,
        "tolerance": None,
        "near_ties": None,
    }


def main() -> None:
    """Write a run by the command line's options, and print its size."""
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("folder", type=Path)
    parser.add_argument("--prompts", type=int, default=480)
    parser.add_argument("--rows", type=int, default=45)
    parser.add_argument("--passes", type=int, default=1)
    options = parser.parse_args()
    run = write(options.folder, options.prompts, options.rows, options.passes)
    size = (run.path / "records.jsonl").stat().st_size
    count = options.prompts * options.rows * options.passes
    print(json.dumps({"records": count, "bytes": size}))  # noqa: T201


if __name__ == "__main__":
    main()

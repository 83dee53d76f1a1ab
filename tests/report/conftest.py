"""Synthetic runs: records of N prompts x methods, without a model."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import pytest

from specbench_cli.store.run_dir import Prompt, RunDir
from specbench_cli.store.schema import (
    LOSSLESS,
    ForwardKind,
    Ns,
    Params,
    Record,
    Steps,
    Trace,
    Verdict,
)
from specbench_cli.summary.summary import summarise

FAMILIES = ("math_reasoning", "multi_turn", "qa", "rag", "summarization", "translation")


@dataclass(frozen=True)
class Fake:
    """A simulated method.

    It drafts `length` levels per step. Each level is accepted with probability `alpha`. With an
    accept rule, a rejected level is accepted as relaxed with probability `relaxed`.
    """

    label: str
    method: str | None = None
    length: int = 0
    alpha: float = 0.0
    cost: float = 1.0
    draft_cost: float = 0.0
    jitter: float = 0.03
    peer: bool = False
    guarantee: str = "exact_tokens"
    verdict: str = "identical"
    sees_steps: bool = True
    relaxed: float | None = None


VANILLA = Fake("vanilla", verdict="reference")
SPS = Fake("sps", length=5, alpha=0.7, cost=1.2, draft_cost=0.12)
PLD = Fake("pld", length=10, alpha=0.35, cost=1.25, draft_cost=0.002)
STAGED = Fake("staged", length=5, alpha=0.7, cost=1.2, draft_cost=0.115)
HF_VANILLA = Fake("hf:vanilla", cost=1.45, peer=True)
HF_ASSISTED = Fake("hf:assisted", length=5, alpha=0.7, cost=1.7, draft_cost=0.3, peer=True)
DEFAULT = (VANILLA, SPS, PLD, STAGED, HF_VANILLA, HF_ASSISTED)


def make_records(
    fakes: Sequence[Fake] = DEFAULT, prompts: int = 48, passes: int = 1, tokens: int = 64
) -> list[Record]:
    """Return the records of a run, with times that are multiples of a forward of about 3 ms.

    If a method is lossy, all answers get the score 1, because unscored lossy methods have no
    speedup.
    """
    records = []
    scored = any(fake.guarantee not in LOSSLESS for fake in fakes)
    for pass_ in range(passes):
        for prompt in range(prompts):
            difficulty = np.random.default_rng([7, prompt]).lognormal(0, 0.2)
            for place, fake in enumerate(fakes):
                rng = np.random.default_rng([pass_, prompt, place])
                records.append(_record(fake, prompt, pass_, tokens, 3e6 * difficulty, rng))
                records[-1].score = 1.0 if scored else None
    return records


def _record(
    fake: Fake, prompt: int, pass_: int, n: int, forward_ns: float, rng: np.random.Generator
) -> Record:
    counters: dict[str, list[int]] = {k: [] for k in ("levels", "tested", "accepted", "committed")}
    left, origin, relaxed = n - 1, ["prefill"], []
    while left:
        levels = min(fake.length, left - 1)
        origins: list[str] = []
        while len(origins) < levels and (origin_word := _draw_origin(fake, rng)):
            origins.append(origin_word)
        counters["levels"].append(levels)
        counters["accepted"].append(origins.count("accepted"))
        counters["tested"].append(min(levels, len(origins) + 1))
        counters["committed"].append(len(origins) + 1)
        relaxed.append(origins.count("relaxed"))
        origin += [*origins, "plain" if not levels else "recovered"]
        left -= len(origins) + 1
    steps = Steps(nodes=list(counters["levels"]), **counters)
    if fake.relaxed is not None:
        steps.relaxed = relaxed
    n_steps, drafted = len(steps.levels), sum(steps.levels)
    noise = rng.lognormal(0, fake.jitter)
    verify = int(n_steps * fake.cost * forward_ns * noise)
    draft = int(drafted * fake.draft_cost * forward_ns * noise)
    host, prefill = int(0.05 * (verify + draft)), int(4 * forward_ns)
    decode = verify + draft + host
    ns = Ns(prefill + decode, prefill, decode, draft, verify, host)
    family = FAMILIES[prompt % len(FAMILIES)]
    return Record(
        prompt_id=f"mini/{prompt}",
        cluster=f"mini/{prompt}",
        task="mini",
        family=family,
        category=family,
        turn=1,
        method=fake.method or fake.label,
        label=fake.label,
        peer=fake.peer,
        params=Params({}, {"length": fake.length}),
        sampling="greedy",
        guarantee=fake.guarantee,
        pass_=pass_,
        seed=0,
        output_ids=list(range(n)),
        origin=origin,
        n_tokens=n,
        finish="length",
        steps=steps if fake.sees_steps else None,
        target_forwards=n_steps + 1,
        draft_forwards=drafted,
        forwards=_trace(steps, ns),
        ns=ns,
        peak_bytes=100_000_000,
        other_cpu=0.01,
        verdict=Verdict(fake.verdict, 0 if fake.verdict in ("near-tie", "mismatch") else None),
        score=None,
        void=False,
        error=None,
    )


def _trace(steps: Steps, ns: Ns) -> Trace:
    """Return a trace: a prefill, then for each step its draft forwards and its verification."""
    kinds = [ForwardKind("target", role, 0, 1, (0, 8)) for role in ("prefill", "verify")]
    kinds.append(ForwardKind("d", "draft", 0, 1, (0, 2)))
    trace, now = Trace(kinds, [0], [9], [0], [ns.prefill]), ns.prefill
    draft, verify = ns.draft // max(1, sum(steps.levels)), ns.verify // len(steps.levels)
    for levels, nodes in zip(steps.levels, steps.nodes, strict=True):
        for kind, rows, length in [(2, 1, draft)] * levels + [(1, 1 + nodes, verify)]:
            trace.kind.append(kind)
            trace.n_tokens.append(rows)
            trace.t0_ns.append(now)
            now += length
            trace.t1_ns.append(now)
    return trace


def _draw_origin(fake: Fake, rng: np.random.Generator) -> str:
    """Return the origin of a tested level's token, or "" if the level is rejected."""
    if rng.random() < fake.alpha:
        return "accepted"
    return "relaxed" if fake.relaxed is not None and rng.random() < fake.relaxed else ""


MANIFEST: dict[str, Any] = {
    "schema": 1,
    "status": "finished",
    "version": "0.1.0",
    "created_utc": "2026-11-21T10:24:03Z",
    "finished_utc": "2026-11-21T10:26:11Z",
    "config": {
        "effective": {
            "verify": "greedy",
            "temperature": 0.0,
            "dtype": "float32",
            "device": "cpu",
            "threads": 2,
            "seed": 0,
            "limit": 48,
        }
    },
    "config_sources": {"limit": "flag"},
    "versions": {"python": "3.11.7", "torch": "2.13.0"},
    "machine": {"cpu": "some CPU", "cores": 2},
    "git": {"commit": "abc", "dirty": False},
    "models": {
        "target": {"label": "embedded-7m", "hash": "aa"},
        "draft": {"label": "embedded-1m", "hash": "bb"},
    },
    "tasks": [
        {"name": "mini", "version": 1, "sha256": "cc", "n_questions": 480, "embedded": "trained"}
    ],
    "noisy": False,
    "tolerance": {"logits": 1e-4},
    "aa_noise": None,
}


@dataclass(frozen=True)
class Synthetic:
    """The simulated methods and the function that makes their records."""

    records: Callable[..., list[Record]] = make_records
    Fake: type[Fake] = Fake
    vanilla: Fake = VANILLA
    sps: Fake = SPS
    pld: Fake = PLD
    staged: Fake = STAGED
    hf_vanilla: Fake = HF_VANILLA
    hf_assisted: Fake = HF_ASSISTED


@pytest.fixture(scope="session")
def synthetic() -> Synthetic:
    """The builder of simulated runs."""
    return Synthetic()


@pytest.fixture
def manifest() -> dict[str, Any]:
    """A copy of the manifest of a finished run, which a test may change."""
    import copy

    return copy.deepcopy(MANIFEST)


@pytest.fixture
def make_run(tmp_path, manifest) -> Callable[..., RunDir]:
    """Return a function that writes a finished run of simulated methods.

    `change` edits the manifest in place, `edit` returns a changed record, and `size` has the
    number of prompts, passes and tokens.
    """
    import copy

    def make(
        name: str = "run",
        fakes: Sequence[Fake] = DEFAULT,
        *,
        change: Callable[[dict[str, Any]], object] = lambda _: None,
        edit: Callable[[Record], Record] = lambda record: record,
        **size: int,
    ) -> RunDir:
        run_manifest = copy.deepcopy(manifest)
        change(run_manifest)
        run = RunDir.create(tmp_path / name, run_manifest)
        records = [edit(record) for record in make_records(fakes, **{"prompts": 12, **size})]
        run.append(records)
        first = {record.prompt_id: record for record in reversed(records)}
        run.append_prompts(
            Prompt(id_, r.cluster, r.task, r.family, r.category, 1, "?", [n])
            for n, (id_, r) in enumerate(sorted(first.items(), key=lambda pair: int(pair[0][5:])))
        )
        run.close("finished")
        return run

    return make


SWEPT_LENGTHS = (1, 3, 5, "heuristic")


@pytest.fixture
def swept_run(synthetic, manifest):
    """Return a function that makes the summary and manifest of a run with a swept method."""

    def make(*more, **config):
        swept = [
            synthetic.Fake(
                f"sps length={value}",
                "sps",
                length=value if isinstance(value, int) else 4,
                alpha=0.7,
                cost=1.2,
                draft_cost=0.12,
            )
            for value in SWEPT_LENGTHS
        ]
        fakes = [synthetic.vanilla, *swept, synthetic.pld, synthetic.hf_vanilla, *more]
        records = synthetic.records(fakes, prompts=12)
        for record in records:
            if record.method == "sps":
                origin_word = record.label.partition("=")[2]
                record.params.effective["length"] = (
                    int(origin_word) if origin_word.isdigit() else origin_word
                )
        manifest["config"]["effective"] |= {
            "sweep": {"sps": {"length": list(SWEPT_LENGTHS)}},
            "methods": [{"name": fake.method or fake.label, "label": fake.label} for fake in fakes],
        } | config
        return summarise(records, manifest, resamples=199), manifest

    return make

"""A simulated run whose outputs are real texts, with drafts, log probabilities and traces."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import replace

import pytest

from specbench_cli.report.tokens import load_tokenizer
from specbench_cli.store.run_dir import Prompt, RunDir
from specbench_cli.store.schema import DraftedTokens, ForwardKind, Record, Trace, Verdict

EVIL = "</script><script>alert(1)</script><img src=x onerror=alert(2)> &amp; \u2028 "
TEXTS = (
    EVIL + "Anna has 3 apples.\n\nShe buys 4 more 🍎 at the market: 3 + 4 = 7. ",
    "Größe, naïve, 日本語: letters that take more than one token. ",
    "The capital of the country lies on a river, as many capitals do. ",
)
LABELS = ("vanilla", "sps", "tree", "pld", "loose", "hf:vanilla", "bad")


@pytest.fixture(scope="session")
def encode() -> Callable[[str], list[int]]:
    """Return a function from a text to the token ids of the embedded model."""
    tokenizer = load_tokenizer("embedded-7m")
    return lambda text: list(tokenizer(text)["input_ids"])


@pytest.fixture
def make_run(synthetic, manifest, tmp_path, encode) -> Callable[..., RunDir]:
    """Return a function that makes a run of these prompts and methods."""
    Fake = synthetic.Fake
    fakes = {
        "vanilla": synthetic.vanilla,
        "sps": synthetic.sps,
        "tree": Fake("tree", "sps-tree", length=4, alpha=0.7, cost=1.3, draft_cost=0.1),
        "pld": synthetic.pld,
        "loose": Fake("loose", length=5, alpha=0.7, cost=1.1, guarantee="quality_only",
                      verdict="unchecked", relaxed=0.5),
        "hf:vanilla": replace(synthetic.hf_vanilla, sees_steps=False),
        "bad": Fake("bad", "gone", length=3, alpha=0.5, cost=1.2, verdict="mismatch"),
    }  # fmt: skip
    texts = [encode(text * 40) for text in TEXTS]

    def make(prompts: int = 6, labels=LABELS, tokens: int = 64, **changes: int) -> RunDir:
        chosen = [fakes.get(label) or replace(fakes["tree"], label=label) for label in labels]
        run = RunDir.create(tmp_path / "run", {**manifest, **changes})
        records = synthetic.records(chosen, prompts=prompts, tokens=tokens)
        at = {name: place for place, name in enumerate(dict.fromkeys(r.prompt_id for r in records))}
        run.append_prompts(
            Prompt(r.prompt_id, r.cluster, r.task, r.family, r.category, 1,
                   f"{EVIL}Question {r.prompt_id}?", [1])
            for r in records if r.label == "vanilla"
        )  # fmt: skip
        run.append(with_text(r, texts[at[r.prompt_id] % len(texts)][:tokens]) for r in records)
        run.close("finished")
        return run

    return make


def with_text(record: Record, ids: list[int]) -> Record:
    """Return the record with `ids` as its output, and with fitting origins, drafts and trace."""
    if record.label == "bad":
        expected, ids = ids[9], [*ids[:9], ids[10], *ids[10:]]
        record = replace(record, verdict=Verdict("mismatch", 9, 1.25, expected))
    log_probs = [-0.125 * (place % 9) for place in range(len(ids))]
    if record.peer:
        return replace(record, output_ids=ids, origin=None, log_probs=None, forwards=None)
    steps, origin, drafts, at = record.steps, ["prefill"], [], 1
    for levels, committed in zip(steps.levels, steps.committed, strict=True):
        accepted = committed - 1
        last = "plain" if not levels else "bonus" if accepted == levels else "recovered"
        origins = (
            ["accepted"] * accepted if steps.relaxed is None else record.origin[at : at + accepted]
        )
        origin += [*origins, last]
        drafts.append(make_draft(ids[at : at + accepted], levels, tree=record.method == "sps-tree"))
        at += committed
    n, ns = len(steps.levels), record.ns
    ends = [ns.prefill + math.floor(ns.decode * (step + 1) / n) for step in range(n)]
    nodes = [len(each.tokens) for each in drafts]
    return replace(
        record, output_ids=ids, origin=origin, drafts=drafts, log_probs=log_probs,
        steps=replace(steps, nodes=nodes), draft_forwards=0,
        forwards=make_trace(ns.prefill, ends, nodes),
    )  # fmt: skip


def make_draft(accepted: list[int], levels: int, *, tree: bool) -> DraftedTokens:
    """Return a draft whose first levels, `accepted`, are accepted.

    A tree has a second, rejected node on each level.
    """
    chain = [*accepted, *range(300, 300 + levels - len(accepted))]
    if not tree:
        return DraftedTokens(chain, None, list(range(len(accepted))))
    tokens = [token for main in chain for token in (main, main % 100 + 500)]
    parents = [2 * (node // 2) - 2 if node > 1 else -1 for node in range(len(tokens))]
    return DraftedTokens(tokens, parents, [2 * level for level in range(len(accepted))])


def make_trace(prefill: int, ends: list[int], nodes: list[int]) -> Trace:
    """Return a trace of a prefill and one verification per step."""
    kinds = [ForwardKind("target", role, 0, 1, (0, 8)) for role in ("prefill", "verify")]
    starts = [0, prefill, *ends[:-1]]
    rows = [9, *(1 + n for n in nodes)]
    return Trace(kinds, [0, *[1] * len(ends)], rows, starts, [prefill, *ends], [])

"""Tests of `sps` on every model family, fused or hosted, against `generate` of transformers."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from methods.sps import Sps
from methods.sps_tree import SpsTree, SpsTreeParams
from methods.vanilla import Vanilla
from specbench_cli.engine.models.fused import FusedDecoder
from specbench_cli.engine.models.load import get_module, load_decoder
from specbench_cli.engine.models.transformers_decoder import TransformersDecoder
from specbench_cli.engine.request import Request
from specbench_cli.engine.sequence import StopRule
from specbench_cli.engine.session import Session
from specbench_cli.engine.types import Step, Tokens
from specbench_cli.engine.verify.sampling import Sampling
from specbench_cli.engine.workspace import Workspace

FUSED = {
    "llama": ("llama", {}),
    "llama tied": ("llama", {"tie_word_embeddings": True}),
    "mistral": ("mistral", {}),
    "qwen2": ("qwen2", {}),
    "qwen3": ("qwen3", {}),
}
HOSTED = {name: (name, {}) for name in ("gemma2", "gemma3", "phi3", "olmo2", "gpt2")}
PROMPTS = [
    tuple(torch.randint(2, 197, (n,), generator=torch.Generator().manual_seed(n)).tolist())
    for n in (1, 5, 12, 23)
]
BUDGET = 24
GREEDY = Sampling()


def open_session(
    workspace: Workspace, prompt: tuple[int, ...], sampling: Sampling = GREEDY
) -> Session:
    request = Request(f"{prompt}", 1, prompt, StopRule(frozenset(), BUDGET))
    return Session(workspace, request, sampling)


def run(method: Any, session: Session) -> list[Step]:
    return list(method.generate(session))


@pytest.mark.parametrize("case", [*FUSED, *HOSTED])
def test_sps_is_lossless_on_every_family(tiny_checkpoint: Callable[..., Path], case: str) -> None:
    family, overrides = (FUSED | HOSTED)[case]
    folder = tiny_checkpoint(family, **overrides)
    other_draft = tiny_checkpoint(family, seed=1, **overrides)
    target = load_decoder(folder, name="target")
    assert isinstance(target, FusedDecoder if case in FUSED else TransformersDecoder)
    with_other_draft = Workspace(
        {"target": target, "draft": load_decoder(other_draft, name="draft")}, capacity=64
    )
    with_same_draft = Workspace(
        {"target": target, "draft": load_decoder(folder, name="draft")}, capacity=64
    )
    for prompt in PROMPTS:
        ids = torch.tensor([prompt])
        expected = get_module(target).generate(
            ids,
            attention_mask=torch.ones_like(ids),
            max_new_tokens=BUDGET,
            do_sample=False,
            eos_token_id=None,
            pad_token_id=0,
        )
        answer = expected[0, len(prompt) :].tolist()
        tree = SpsTree(SpsTreeParams(widths=(2, 2, 1)))
        for workspace, method in (
            (with_other_draft, Vanilla()),
            (with_other_draft, Sps()),
            (with_same_draft, Sps()),
            (with_other_draft, tree),
            (with_same_draft, tree),
        ):
            session = open_session(workspace, prompt)
            run(method, session)
            assert list(session.output()) == answer


@pytest.mark.parametrize("family", ["llama", "mistral", "gpt2"])
@pytest.mark.parametrize("seed", [0, 1], ids=["twin", "stranger"])
def test_cache_rows_kept_from_a_tree_equal_recomputed_rows(
    tiny_checkpoint, family: str, seed: int
) -> None:
    target = load_decoder(tiny_checkpoint(family), name="target")
    draft = load_decoder(tiny_checkpoint(family, seed=seed), name="draft")
    method = SpsTree(SpsTreeParams(widths=(2, 2, 2)))
    sampling = Sampling("rejection", 0.7, top_k=8, seed=3)
    session = open_session(Workspace({"target": target, "draft": draft}, 64), PROMPTS[2], sampling)
    for _ in method.generate(session):
        ids = torch.tensor([session.tokens()])
        assert session.state.length() == ids.shape[1] - 1
        for decoder, state in ((target, session.state), (draft, method.levels.state)):
            n = state.length()
            fresh = decoder.new_state(n)
            decoder.forward(Tokens(ids[:, :n]), fresh, logits_at=None)
            for layer in range(decoder.n_layers):
                for rows in ("keys", "values"):
                    ours, theirs = (getattr(s, rows)(layer)[:, :, :n] for s in (state, fresh))
                    torch.testing.assert_close(ours, theirs, rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("case", [*FUSED, *HOSTED])
def test_a_draft_equal_to_the_target_is_fully_accepted(
    tiny_checkpoint: Callable[..., Path], case: str
) -> None:
    family, overrides = (FUSED | HOSTED)[case]
    folder = tiny_checkpoint(family, **overrides)
    with_same_draft = Workspace(
        {role: load_decoder(folder, name=role) for role in ("target", "draft")}, capacity=64
    )
    for prompt in PROMPTS:
        steps = run(Sps(Sps.Params(length=4)), open_session(with_same_draft, prompt))
        assert [len(step.outcome.committed) for step in steps[:-1]] == [5] * (len(steps) - 1)

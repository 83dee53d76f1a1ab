"""Checks on a tiny Llama: its outputs equal those of transformers, its KV caches a
recomputation."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from itertools import islice
from typing import Any

import torch
from torch import Tensor

from specbench_cli.audit.cases import decode_and_learn
from specbench_cli.audit.finding import Finding, Problem
from specbench_cli.audit.models.observed_session import ObservedSession
from specbench_cli.audit.models.tiny import MAX_TOKENS, TinyModels, create_tiny_models
from specbench_cli.audit.reference import truncate_output
from specbench_cli.audit.subject import AuditSubject, format_params, max_draft_levels
from specbench_cli.engine.learning import Memory, learn
from specbench_cli.engine.models.decoder import Decoder
from specbench_cli.engine.models.head import NORMED, Head, features
from specbench_cli.engine.models.state import KVState
from specbench_cli.engine.params import MethodParams
from specbench_cli.engine.partial import Partial
from specbench_cli.engine.types import Features, Input, Rule, Tokens
from specbench_cli.engine.verify.sampling import Sampling

SAMPLINGS: dict[Rule, Sampling] = {
    "greedy": Sampling(),
    "coupled": Sampling("coupled", 0.8, top_k=24, top_p=0.95, seed=3),
    "rejection": Sampling("rejection", 0.8, seed=3),
}
OUTPUTS = 8
"""Number of prompts for each parameter set and decoding rule."""

ROUNDING = 1e-5
"""Maximum difference of cached and recomputed rows, relative to the largest number."""


def check_model(subject: AuditSubject) -> list[Finding]:
    """Compare outputs with transformers' module, and states with recomputation."""
    models = create_tiny_models()
    findings = _check_outputs(subject, models)
    if not subject.method.peer:
        findings.append(_check_caches(subject, models))
    return findings


def _check_outputs(subject: AuditSubject, models: TinyModels) -> list[Finding]:
    compared = wrong = 0
    problem: Problem | None = None
    for rule in ("greedy", "coupled"):
        sampling = SAMPLINGS[rule]
        for params in _few_params(subject, rule):
            g = max_draft_levels(params, default=5)
            memory = _create_memory(subject, params)
            for turn, (prompt, ids) in enumerate(
                islice(models.outputs_without_ties(sampling), OUTPUTS)
            ):
                budget = (MAX_TOKENS, g + 1, MAX_TOKENS, 2)[turn % 4]
                eos = () if turn % 2 == 0 else (ids[turn % 5],)
                session = models.open(
                    prompt,
                    sampling,
                    budget=min(budget, MAX_TOKENS),
                    eos=eos,
                    memory=memory,
                    peer=subject.method.peer,
                )
                decode_and_learn(subject.method(params), session)
                due = truncate_output(ids, eos, min(budget, MAX_TOKENS))
                compared += 1
                if list(session.output()) != due:
                    wrong += 1
                    what = f"the output is {list(session.output())}, transformers' is {due}"
                    where = (
                        f"{format_params(params)}; tiny Llama, {rule}, prompt {prompt}, EOS {eos}"
                    )
                    look = "if the check of tokens passes: positions and masks of the forwards"
                    problem = problem or Problem(what, where, look)
    if not compared:
        return []
    return [Finding("model", not wrong, {"outputs": compared, "wrong": wrong}, problem)]


def _few_params(subject: AuditSubject, rule: Rule) -> Iterator[MethodParams]:
    """Yield the default parameters and the first small variant.

    That is enough here, because the checks on table models cover all other parameters.
    """
    return islice(subject.lossless_params(rule), 2)


def _create_memory(subject: AuditSubject, params: MethodParams) -> Memory | None:
    """Return a memory for a method that learns, else None."""
    return Memory() if subject.method(params).learns else None


def _check_caches(subject: AuditSubject, models: TinyModels) -> Finding:
    """Check after every step that keys and values equal those of one forward over the text."""
    largest, rows = 0.0, 0
    for rule, sampling in SAMPLINGS.items():
        for params in _few_params(subject, rule):
            memory = _create_memory(subject, params)
            for prompt in (3, 13):
                method = subject.method(params)
                session = models.open(prompt, sampling, budget=12, memory=memory)
                for number, _ in enumerate(method.generate(session), start=1):
                    where = f"step {number} of {format_params(params)}; tiny Llama, {rule}"
                    for decoder, state, text in session.states():
                        own = (
                            text is session.tokens()
                        )  # the state of a parallel drafter may be longer than its text
                        n = state.length() if own else min(state.length(), len(text))
                        if n == 0:
                            continue
                        rows += n
                        wrong = _cache_error(session, decoder, state, text, n)
                        if wrong > ROUNDING:
                            return _stale_cache_finding(decoder, wrong, where, rows)
                        largest = max(largest, wrong)
                if method.learns:
                    learn(method, session)
    return Finding("caches", True, {"difference": largest, "rows": rows})


def _cache_error(
    session: ObservedSession, decoder: Decoder | Partial, state: Any, text: Sequence[int], n: int
) -> float:
    """Return the largest relative error of a state's first n rows, against recomputation.

    A layer of a draft model may have fewer rows.
    """
    first = decoder.first
    if first + n > len(text):
        return float("inf")
    ids = torch.tensor([text[: first + n]])
    fresh: Any = decoder.new_state(n)
    x: Input = Tokens(ids)
    if isinstance(decoder, Head):
        x = Features(ids[:, first:], _features(session.target.decoder, decoder, ids[:, :n]))
    decoder.forward(x, fresh, logits_at=None)
    if isinstance(state, KVState) and state.offsets[0]:
        # If some rows of the state were dropped, only the first layer's entries can be recomputed
        # without them.
        at = state.positions()
        fresh = decoder.new_state(at[-1] + 1)
        decoder.forward(Tokens(torch.tensor([text[: at[-1] + 1]])), fresh, logits_at=None)
        return _relative_difference(state.keys(0)[:, :, :n], fresh.keys(0)[:, :, at])
    worst = 0.0
    for layer in (
        decoder.attention_layers if isinstance(decoder, Partial) else range(decoder.n_layers)
    ):
        held = n if decoder.name == "target" else min(n, state.length(0, layer))
        if not held:
            continue
        for ours, due in (
            (state.keys(layer), fresh.keys(layer)),
            (state.values(layer), fresh.values(layer)),
        ):
            worst = max(worst, _relative_difference(ours[:, :, :held], due[:, :, :held]))
    return worst


def _features(target: Decoder, head: Head, ids: Tensor) -> Tensor:
    """Return the features that a head reads from the target for ids [1, n], recomputed."""
    layers = tuple(at for at in head.captured_layers if at != NORMED)
    out = target.forward(
        Tokens(ids), target.new_state(ids.shape[1]), logits_at=None, captured_layers=layers
    )
    return features(out, head.captured_layers, target)[None]


def _relative_difference(ours: Tensor, due: Tensor) -> float:
    return float((ours - due).abs().max() / due.abs().max())


def _stale_cache_finding(
    decoder: Decoder | Partial, wrong: float, where: str, rows: int
) -> Finding:
    what = f"the {decoder.name}'s cache is off by {wrong:.2g} of its largest number"
    look = (
        "rows of rejected tokens that were not removed, missing tokens, or wrong positions. In a"
        " head: rows made from its own features, or from features of another token"
    )
    figure = {"difference": wrong, "rows": rows}
    return Finding("caches", False, figure, Problem(what, where, look))

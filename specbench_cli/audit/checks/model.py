"""A method on a real model: transformers' tokens, and caches that equal recomputation."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from itertools import islice
from typing import Any

import torch
from torch import Tensor

from specbench_cli.audit.cases import decode_and_learn
from specbench_cli.audit.finding import Finding, Problem
from specbench_cli.audit.models.observed_session import ObservedSession
from specbench_cli.audit.models.tiny import LONGEST, TinyModels, tiny_models
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
"""Prompts for each variant and rule."""

ROUNDING = 1e-5
"""Largest difference of cached rows from recomputed ones, as a share of the largest number."""


def check_model(subject: AuditSubject) -> list[Finding]:
    """Greedy and coupled outputs against transformers' module; states against recomputation."""
    models = tiny_models()
    findings = _tokens(subject, models)
    if not subject.method.peer:
        findings.append(_states(subject, models))
    return findings


def _tokens(subject: AuditSubject, models: TinyModels) -> list[Finding]:
    compared = wrong = 0
    problem: Problem | None = None
    for rule in ("greedy", "coupled"):
        sampling = SAMPLINGS[rule]
        for params in _few(subject, rule):
            g = max_draft_levels(params, default=5)
            memory = _memory(subject, params)
            for turn, (prompt, ids) in enumerate(islice(models.clear(sampling), OUTPUTS)):
                budget = (LONGEST, g + 1, LONGEST, 2)[turn % 4]
                eos = () if turn % 2 == 0 else (ids[turn % 5],)
                session = models.open(
                    prompt,
                    sampling,
                    budget=min(budget, LONGEST),
                    eos=eos,
                    memory=memory,
                    peer=subject.method.peer,
                )
                decode_and_learn(subject.method(params), session)
                due = truncate_output(ids, eos, min(budget, LONGEST))
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


def _few(subject: AuditSubject, rule: Rule) -> Iterator[MethodParams]:
    """The defaults and the first short variant: what else there is, tables have shown."""
    return islice(subject.lossless_params(rule), 2)


def _memory(subject: AuditSubject, params: MethodParams) -> Memory | None:
    """What a method that learns keeps from prompt to prompt."""
    return Memory() if subject.method(params).learns else None


def _states(subject: AuditSubject, models: TinyModels) -> Finding:
    """After every step, keys and values of every state equal those of one forward from scratch."""
    largest, rows = 0.0, 0
    for rule, sampling in SAMPLINGS.items():
        for params in _few(subject, rule):
            memory = _memory(subject, params)
            for prompt in (3, 13):
                method = subject.method(params)
                session = models.open(prompt, sampling, budget=12, memory=memory)
                for number, _ in enumerate(method.generate(session), start=1):
                    where = f"step {number} of {format_params(params)}; tiny Llama, {rule}"
                    for decoder, state, text in session.states():
                        own = text is session.tokens()  # a drafter may roll out beyond its text
                        n = state.length() if own else min(state.length(), len(text))
                        if n == 0:
                            continue
                        rows += n
                        wrong = _recompute(session, decoder, state, text, n)
                        if wrong > ROUNDING:
                            return _stale(decoder, wrong, where, rows)
                        largest = max(largest, wrong)
                if method.learns:
                    learn(method, session)
    return Finding("caches", True, {"difference": largest, "rows": rows})


def _recompute(
    session: ObservedSession, decoder: Decoder | Partial, state: Any, text: Sequence[int], n: int
) -> float:
    """The largest difference of a state's first n rows from those computed from the text; a draft
    model's layer may hold fewer."""
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
        # Of chosen rows the first layer's alone do not depend on what was left out meanwhile.
        at = state.positions()
        fresh = decoder.new_state(at[-1] + 1)
        decoder.forward(Tokens(torch.tensor([text[: at[-1] + 1]])), fresh, logits_at=None)
        return _gap(state.keys(0)[:, :, :n], fresh.keys(0)[:, :, at])
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
            worst = max(worst, _gap(ours[:, :, :held], due[:, :, :held]))
    return worst


def _features(target: Decoder, head: Head, ids: Tensor) -> Tensor:
    """What a head reads of the target's rows of ids [1, n], computed from scratch."""
    layers = tuple(tap for tap in head.taps if tap != NORMED)
    out = target.forward(Tokens(ids), target.new_state(ids.shape[1]), logits_at=None, taps=layers)
    return features(out, head.taps, target)[None]


def _gap(ours: Tensor, due: Tensor) -> float:
    return float((ours - due).abs().max() / due.abs().max())


def _stale(decoder: Decoder | Partial, wrong: float, where: str, rows: int) -> Finding:
    what = f"the {decoder.name}'s cache is off by {wrong:.2g} of its largest number"
    look = (
        "rows of rejected tokens that stayed, tokens left out, or positions that are off; a head's"
        " rows that were made of its own features, or of those of another token"
    )
    figure = {"difference": wrong, "rows": rows}
    return Finding("caches", False, figure, Problem(what, where, look))

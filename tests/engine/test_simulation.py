"""The simulator, compared with the real driver on a clock driven by a cost table."""

from __future__ import annotations

import random
from dataclasses import replace
from functools import cache

import pytest

from specbench_cli import registry
from specbench_cli.audit.models.tiny import create_tiny_models, nominal_cost
from specbench_cli.engine.request import Request
from specbench_cli.engine.sequence import StopRule
from specbench_cli.engine.session import Session
from specbench_cli.engine.simulation import (
    ScriptedRequest,
    SimulatedClock,
    SimulatedTimeDecoder,
    run_batch,
    simulate,
)
from specbench_cli.engine.verify.sampling import Sampling
from specbench_cli.engine.workspace import Workspace
from specbench_cli.errors import MethodFault

ARRIVALS = [0.0, 0.0, 0.0001, 0.004, 0.0041, 0.0042, 0.2, 0.2003]
"""Arrival times in seconds: some at once, some during decoding, some after an idle time."""


def price(work):
    """Return the cost in nanoseconds: per forward, row, attended row, and sequence."""
    constant, row = {"target": (1e6, 5e4), "draft": (1e5, 8e3)}[work.model]
    return constant + sum(
        row * n + 30 * n * before + 2e4 * (not prompt) for n, before, prompt in work.rows
    )


@cache
def requests():
    """Return eight requests with prompts of 2 to 80 tokens.

    Every other one ends at a token in the middle of vanilla's output.
    """
    models, vanilla = create_tiny_models(), registry.load("vanilla")()
    found = []
    for at, budget in enumerate((24, 1, 9, 17, 2, 24, 13, 5)):
        prompt = models.prompts[2 * at] * (1 + 2 * (at % 3))
        request = Request(f"tiny/{at}", 1, prompt, StopRule(frozenset(), budget))
        if at % 2 == 0:
            session = Session(models.workspace, request, Sampling())
            list(vanilla.generate(session))
            stop = StopRule(frozenset({session.output()[budget // 2]}), budget)
            request = replace(request, stop=stop)
        found.append(request)
    return found


def run_driver(method, size, chunk):
    """Run the real driver with real models, on a clock that the table drives."""
    tiny, clock = create_tiny_models().workspace, SimulatedClock()
    decoders = {
        name: SimulatedTimeDecoder(model, clock, price) for name, model in tiny.decoders.items()
    }
    workspace = Workspace(decoders, tiny.capacity, costs=nominal_cost)
    return run_batch(
        method, workspace, requests(), clock, size=size, chunk=chunk, arrivals=ARRIVALS
    )


def script(session):
    """Return what a record contains: the prompt, the output, and which tokens were drafted."""
    (request,), text = session.requests, session.harness.text
    right = tuple(origin == "accepted" for origin in text.origin)
    return ScriptedRequest(
        request.ids,
        tuple(session.output()),
        right,
        request.stop.max_new_tokens,
        session.finish == "eos",
    )


def events(batch):
    """Return all actions with their sequences and times."""
    forwards = [
        (f.model, f.role, dict(f.rows), f.prompt_places, f.t0_ns, f.t1_ns)
        for f in batch.meter.forwards
    ]
    texts = [session.harness.text for session in batch.sessions]
    tokens = [(*text.output, *text.origin, text.finish) for text in texts]
    times = [(text.first_ns, text.last_ns) for text in texts]
    return forwards, tokens, times, (batch.prefill_ns, batch.idle_ns)


ROWS = [
    ("vanilla", {}),
    ("pld", {}),
    ("sps", {"length": 3}),
    ("eqspec", {"length": 4}),
    ("eqspec", {"length": "heuristic"}),
    ("eqspec", {"length": "synergy", "max": 6}),
    ("eqspec", {"length": "smartspec", "max": 6}),
    ("exspec", {"length": "smartspec", "window": 5}),
]


@pytest.mark.parametrize(("name", "params"), ROWS)
@pytest.mark.parametrize(("size", "chunk"), [(1, None), (3, 256), (3, 7)])
def test_simulator_and_driver_agree_on_every_token_and_event(name, params, size, chunk):
    method = registry.build(name, params)
    real = run_driver(method, size, chunk)
    scripts = [script(session) for session in real.sessions]
    how = {"size": size, "chunk": chunk, "arrivals": ARRIVALS}
    found = simulate(method, scripts, price, **how, costs=nominal_cost)
    for ours, theirs in zip(events(found), events(real), strict=True):
        assert ours == theirs
    assert real.idle_ns > 0.1e9 and {session.finish for session in real.sessions} == {
        "length",
        "eos",
    }


def test_the_clock_moves_only_by_the_costs():
    clock = SimulatedClock()
    clock.sleep(70)
    assert (clock.now_ns(), clock.mark()) == (70, 70)
    clock.restart()
    assert clock.mark() == 0
    one = ScriptedRequest((1, 2), (3, 4, 5), (False,) * 3, 3)
    batch = simulate(registry.build("vanilla", {}), [one], lambda work: 10, size=1)
    text = batch.sessions[0].harness.text
    assert (text.first_ns, text.last_ns) == (10, 30)


def test_another_policy_is_simulated_from_the_recorded_acceptance():
    draw = random.Random(4)
    scripts = [
        ScriptedRequest((at, 1), tuple(draw.choices(range(9), k=40)), (True,) * 40, 40)
        for at in range(3)
    ]
    sure = simulate(registry.build("eqspec", {"length": 4}), scripts, price, size=3)
    steps = [f for f in sure.meter.forwards if (f.model, f.role) == ("target", "verify")]
    assert len(steps) == 8  # 39 tokens, 5 per step
    wrong = [ScriptedRequest(s.prompt, s.output, (False,) * 40, 40) for s in scripts]
    never = simulate(registry.build("eqspec", {"length": 4}), wrong, price, size=3)
    assert [list(s.output()) for s in never.sessions] == [list(s.output) for s in scripts]
    assert sum(f.role == "verify" for f in never.meter.forwards) == 39


def test_work_that_scripts_do_not_contain_is_refused():
    one = ScriptedRequest((1, 2), (3, 4, 5, 6, 7, 8), (False,) * 6, 6)
    with pytest.raises(
        MethodFault, match="no trees, no draft heads, no partial forwards of the target"
    ):
        simulate(registry.build("sps-tree", {}), [one], price, size=1)
    other = ScriptedRequest((1, 2), (3, 3), (False,) * 2, 2)
    with pytest.raises(ValueError, match="one prompt and different outputs"):
        simulate(registry.build("vanilla", {}), [one, other], price, size=1)

"""The replay of recorded requests by the engine's own driver: scripts in, costs in, timelines out.

A script says what the models would have said (`engine.simulation`). Batches, methods and their
policies are those that measure, so that they choose their own order of forwards. Outputs are those
recorded, and the draft model is right where a drafted token was accepted and wrong where one was
rejected. Tokens that were never tested are right with the chance that the tested ones of the same
output had.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from random import Random
from typing import TYPE_CHECKING, Any, NamedTuple

from specbench_cli import registry
from specbench_cli.engine.forward_cost import CostFunction
from specbench_cli.errors import SpecbenchError
from specbench_cli.measure.costs import Costs
from specbench_cli.predict.run_costs import probe_command
from specbench_cli.store.run_dir import Prompt
from specbench_cli.store.schema import LOSSLESS, Record

if TYPE_CHECKING:
    from specbench_cli.engine.method import Method
    from specbench_cli.engine.simulation import Script

LENGTHS = ("heuristic", "synergy", "smartspec")
"""Rules for draft lengths that do not depend on the draft model's probabilities."""

PromptIds = dict[tuple[str, int], tuple[int, ...]]
"""Token ids of prompts, by prompt and turn."""


class RequestTimeline(NamedTuple):
    """A simulated request: ns of its first and last token since the start, and how many tokens and
    steps it took. Its prefill counts as a step."""

    first: int
    last: int
    tokens: int
    steps: int


class CannotSimulate(SpecbenchError):
    """A method whose records do not hold what a simulation needs."""


def prompt_ids(prompts: Iterable[Prompt]) -> PromptIds:
    """Return the token ids of a run's prompts."""
    return {(each.prompt_id, each.turn): tuple(each.ids) for each in prompts}


def policy_costs(manifest: Mapping[str, Any], costs: Costs) -> Any:
    """Return the costs by which the run's methods chose draft lengths; else those of a table."""
    from specbench_cli.measure.step_costs import StepCosts, step_costs_from_probe

    known = manifest.get("step_costs")
    return StepCosts.model_validate(known) if known else step_costs_from_probe(costs)


def method_from_records(records: Sequence[Record]) -> Method:
    """Return the method of records.

    Raises:
        CannotSimulate: scripts do not say what the method asks for.
    """
    first = records[0]
    if first.peer:
        raise CannotSimulate("another program's, whose steps are its own")
    if first.guarantee not in LOSSLESS:
        raise CannotSimulate("lossy: what it would accept elsewhere is not recorded")
    if any(record.error is not None for record in records):
        raise CannotSimulate("it failed on some prompts")
    try:
        method = registry.build(first.method, first.params.effective)
    except SpecbenchError as fault:
        raise CannotSimulate(fault.message) from fault
    if not method.batches:
        raise CannotSimulate("it decodes one prompt at a time")
    rule = getattr(method.params, "length", 0)
    if isinstance(rule, str) and rule not in LENGTHS:
        raise CannotSimulate(f"length={rule} goes by what the draft model says of each token")
    if (
        method.artifacts()
        or method.models()
        or method.any_vocabulary
        or method.requirements - {"draft"}
    ):
        raise CannotSimulate("its drafts are of no draft model or lookup alone")
    return method


def check_costs(method: Method, costs: Costs, manifest: Mapping[str, Any]) -> None:
    """Raise CannotSimulate if the table has no costs of the method's draft model."""
    if "draft" in method.requirements and "draft" not in costs.curves:
        raise CannotSimulate(f"its draft model was not probed: {probe_command(manifest)}")


def make_scripts(
    records: Sequence[Record], prompts: PromptIds, config: Mapping[str, Any]
) -> list[Script]:
    """Return a script of each record.

    Args:
        config: The run's configuration.
    Raises:
        CannotSimulate: the run does not hold its prompts, outputs and origins.
    """
    from specbench_cli.engine.simulation import Script

    budget = config.get("max_new_tokens") or max(record.n_tokens or 0 for record in records)
    found = []
    for record in records:
        prompt = prompts.get((record.prompt_id, record.turn))
        if prompt is None or record.output_ids is None or record.origin is None:
            raise CannotSimulate("the run does not hold its prompts, outputs and origins")
        output = tuple(record.output_ids)
        whole = budget if record.finish == "eos" else len(output)
        right = _predicted_flags(record.origin, record.prompt_id)
        found.append(Script(prompt, output, right, whole, record.finish == "eos"))
    return found


def _predicted_flags(origin: Sequence[str], prompt_id: str) -> tuple[bool, ...]:
    """Return for each token whether the draft model predicts it: recorded for tested tokens, drawn
    for the others."""
    accepted, rejected = origin.count("accepted"), origin.count("recovered")
    chance = accepted / (accepted + rejected) if accepted + rejected else 0.0
    draw = Random(prompt_id)
    drawn = [draw.random() < chance for _ in origin]
    known = {"accepted": True, "recovered": False}
    return tuple(known.get(word, guess) for word, guess in zip(origin, drawn, strict=True))


def replay_scripts(
    method: Method,
    scripts: Sequence[Script],
    cost: CostFunction,
    *,
    policy: Any,
    size: int = 1,
    chunk: int | None = None,
    arrivals: Sequence[float] = (),
) -> list[RequestTimeline]:
    """Decode requests again with a method, at other costs.

    Args:
        cost: Returns the ns that a forward takes, the host's work included.
        policy: The costs by which the method chooses draft lengths.
        size: Most sequences in a step. chunk: Most prompt tokens beside them.
        arrivals: When requests arrive, in seconds. Without them all are there at the start.
    """
    from specbench_cli.engine.simulation import simulate

    batch = simulate(method, scripts, cost, size=size, chunk=chunk, arrivals=arrivals, costs=policy)
    texts = (session.harness.text for session in batch.sessions)
    return [RequestTimeline(t.first_ns, t.last_ns, t.position, t.steps) for t in texts]

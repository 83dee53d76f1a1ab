"""Simulated decoding of recorded requests: the real engine and methods, with scripted models.

A script replaces the models of a request (`engine.simulation`): the target generates the recorded
output. The draft model predicts accepted tokens correctly and rejected tokens wrongly. Whether it
predicts a token that was not tested is drawn at random, with the acceptance rate of the output. The
engine chooses batches and draft lengths as in a real run, so forwards may come in another order
than recorded.
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
    from specbench_cli.engine.simulation import ScriptedRequest

LENGTHS = ("heuristic", "synergy", "smartspec")
"""Rules for the draft length that do not depend on the draft model's probabilities."""

PromptIds = dict[tuple[str, int], tuple[int, ...]]
"""Token ids of prompts, by prompt and turn."""


class RequestTimeline(NamedTuple):
    """A simulated request.

    first, last: time of the first and last token, in ns from the start of the simulation.
    tokens: number of output tokens.
    steps: number of steps, prefill included.
    """

    first: int
    last: int
    tokens: int
    steps: int


class CannotSimulate(SpecbenchError):
    """A method cannot be simulated, because its records lack data."""


def prompt_ids(prompts: Iterable[Prompt]) -> PromptIds:
    """Return the token ids of a run's prompts."""
    return {(each.prompt_id, each.turn): tuple(each.ids) for each in prompts}


def load_policy_costs(manifest: Mapping[str, Any], costs: Costs) -> Any:
    """Return the costs that the run's methods used to choose draft lengths.

    If the manifest has none, compute them from the cost table.
    """
    from specbench_cli.measure.step_costs import StepCosts, step_costs_from_probe

    known = manifest.get("step_costs")
    return StepCosts.model_validate(known) if known else step_costs_from_probe(costs)


def method_from_records(records: Sequence[Record]) -> Method:
    """Construct the method that made some records.

    Raises:
        CannotSimulate: the method needs data that scripts do not have.
    """
    first = records[0]
    if first.peer:
        raise CannotSimulate("it is a method of another program")
    if first.guarantee not in LOSSLESS:
        raise CannotSimulate(
            "it is lossy: the tokens that it would accept in other steps are unknown"
        )
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
        raise CannotSimulate(f"length={rule} depends on the draft model's probabilities")
    if (
        method.artifacts()
        or method.models()
        or method.any_vocabulary
        or method.requirements - {"draft"}
    ):
        raise CannotSimulate("it drafts with a head or another model than the run's draft model")
    return method


def check_costs(method: Method, costs: Costs, manifest: Mapping[str, Any]) -> None:
    """Raise CannotSimulate if the table has no costs of the method's draft model."""
    if "draft" in method.requirements and "draft" not in costs.curves:
        raise CannotSimulate(f"its draft model was not probed: {probe_command(manifest)}")


def make_scripts(
    records: Sequence[Record], prompts: PromptIds, config: Mapping[str, Any]
) -> list[ScriptedRequest]:
    """Return a script of each record.

    Args:
        config: configuration of the run.
    Raises:
        CannotSimulate: the run lacks a prompt, or the tokens or origins of an output.
    """
    from specbench_cli.engine.simulation import ScriptedRequest

    budget = config.get("max_new_tokens") or max(record.n_tokens or 0 for record in records)
    found = []
    for record in records:
        prompt = prompts.get((record.prompt_id, record.turn))
        if prompt is None or record.output_ids is None or record.origin is None:
            raise CannotSimulate("the run lacks prompts, output ids or token origins")
        output = tuple(record.output_ids)
        whole = budget if record.finish == "eos" else len(output)
        right = _predicted_flags(record.origin, record.prompt_id)
        found.append(ScriptedRequest(prompt, output, right, whole, record.finish == "eos"))
    return found


def _predicted_flags(origin: Sequence[str], prompt_id: str) -> tuple[bool, ...]:
    """Return, for each token, True if the draft model predicts the token.

    The values are recorded for tokens that were tested. For other tokens, they are drawn at random.
    """
    accepted, rejected = origin.count("accepted"), origin.count("recovered")
    chance = accepted / (accepted + rejected) if accepted + rejected else 0.0
    draw = Random(prompt_id)
    drawn = [draw.random() < chance for _ in origin]
    known = {"accepted": True, "recovered": False}
    return tuple(known.get(word, guess) for word, guess in zip(origin, drawn, strict=True))


def replay_scripts(
    method: Method,
    scripts: Sequence[ScriptedRequest],
    cost: CostFunction,
    *,
    policy: Any,
    size: int = 1,
    chunk: int | None = None,
    arrivals: Sequence[float] = (),
) -> list[RequestTimeline]:
    """Decode recorded requests again with a method and other forward times.

    Args:
        cost: returns the time of a forward in ns, the host's work included.
        policy: costs that the method uses to choose draft lengths.
        size: maximum number of sequences in a step.
        chunk: maximum number of prompt tokens in a step.
        arrivals: arrival times in seconds. Empty: all requests arrive at the start.
    """
    from specbench_cli.engine.simulation import simulate

    batch = simulate(method, scripts, cost, size=size, chunk=chunk, arrivals=arrivals, costs=policy)
    texts = (session.harness.text for session in batch.sessions)
    return [RequestTimeline(t.first_ns, t.last_ns, t.position, t.steps) for t in texts]

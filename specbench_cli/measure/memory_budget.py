"""`--memory-budget`: the largest settings that a run's memory has room for, chosen beforehand."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict
from typing import Any

import torch

from specbench_cli.config.run import RunConfig, nbytes
from specbench_cli.engine.drafting.length_params import LengthParams
from specbench_cli.engine.method import Method
from specbench_cli.errors import MethodFault, PromptError, UsageError
from specbench_cli.measure.bench import readable, tokenizer_of
from specbench_cli.measure.footprint import Footprint, Sizes, expected, footprint
from specbench_cli.measure.placement import choose_device
from specbench_cli.plan.arm import Arm
from specbench_cli.plan.plan import Plan, make_plan, wave
from specbench_cli.tasks import Question, conversation, render
from specbench_cli.tasks.schema import Message

CHANCE = 0.7
"""That a draft token stands, as long as nothing is known: `LengthParams.acceptance`'s default."""


class Room:
    """What settings of a run take."""

    def __init__(self, config: RunConfig) -> None:
        self._plan = plan = make_plan(config)
        device, dtype = choose_device(config.home), getattr(torch, config.dtype)
        self._sizes = {
            role: readable(lambda path: Sizes.of(path, device, dtype), checkpoint)
            for role, checkpoint in plan.checkpoints.items()
        }
        self._budget = max(map(plan.budget, plan.questions))
        self._prompts = list(_prompts(plan, self._budget))
        self.asked = {arm.label: _draft(arm) for arm in plan.arms}

    def footprint(self, batch: int, most: int) -> Footprint:
        """Of a batch whose rows draft at most so many tokens a step."""
        plan = self._plan
        methods = [
            (_limited(arm, min(asked, most)), min(asked, most))
            for arm, asked in zip(plan.arms, self.asked.values(), strict=True)
        ]
        groups = _groups(plan, batch, self._prompts)
        chunk, rule = plan.config.prefill_chunk, plan.config.rule
        return footprint(methods, self._sizes, groups, self._budget, batch, chunk, rule)

    def tokens(self, batch: int, most: int) -> float:
        """Tokens that a step of each row is expected to bring, all rows together."""
        return batch * sum(
            expected(
                getattr(arm.method.params, "acceptance", CHANCE),
                min(self.asked[arm.label], most),
                tree="nodes" in type(arm.method.params).model_fields,
            )
            for arm in self._plan.arms
        )

    def limited(self, most: int) -> list[dict[str, Any]]:
        """The rows of a configuration that draft at most so many tokens."""
        rows = []
        for row, arm in zip(self._plan.config.methods, self._plan.arms, strict=True):
            key, asked = _key(arm.method), self.asked[arm.label]
            changed = {} if key is None or asked <= most else {key: most}
            rows.append({**row.model_dump(), "params": {**row.params, **changed}})
        return rows


def within(config: RunConfig) -> tuple[RunConfig, dict[str, Any] | None]:
    """A configuration within its memory budget, and what the manifest keeps of that; as it is where
    it has none.

    What was asked for (batch, draft lengths, tree nodes) is the most that is taken. Of all that
    fits, what is expected to bring most tokens a step is chosen; the larger batch of two alike.

    Raises:
        UsageError: nothing fits, or a row's memory is not known beforehand.
    """
    if config.memory_budget is None:
        return config, None
    limit = nbytes(config.memory_budget)
    try:
        room = Room(config)
        least = room.footprint(1, 1)
        if least.total > limit:
            raise UsageError(
                f"--memory-budget {config.memory_budget} is impossible: batch 1 with drafts of one"
                f" token takes {written(least)}",
                hint=f"--memory-budget {-(-least.total // 1_000_000)}MB or more, a smaller --target"
                " or --draft, --dtype bfloat16, fewer methods, or shorter outputs"
                " (--max-new-tokens)",
            )
        batch, most = max(_fitting(room, config.batch, limit), key=lambda each: room.tokens(*each))
        chosen = room.footprint(batch, most)
    except MethodFault as fault:
        raise UsageError(
            f"--memory-budget: {fault.message}", hint="leave that row out, or --memory-budget"
        ) from fault
    rows = room.limited(most)
    told = {
        "budget_bytes": limit,
        "asked": {"batch": config.batch, "drafts": room.asked},
        "chosen": {
            "batch": batch,
            "drafts": {label: min(asked, most) for label, asked in room.asked.items()},
        },
        "predicted": {**asdict(chosen), "total": chosen.total},
    }
    data = {**config.model_dump(), "batch": batch, "methods": rows}
    return RunConfig.model_validate(data), told


def written(found: Footprint) -> str:
    """A footprint, for a person."""
    parts = ", ".join(f"{name} {_mb(size)}" for name, size in asdict(found).items() if size)
    return f"{_mb(found.total)} ({parts})"


def sentence(told: Mapping[str, Any]) -> str:
    """What was chosen, for a person."""
    asked, chosen = told["asked"], told["chosen"]
    drafts = ", ".join(
        f"{label} {most} of {asked['drafts'][label]}"
        for label, most in chosen["drafts"].items()
        if asked["drafts"][label]
    )
    words = f"batch {chosen['batch']} of {asked['batch']}" + (
        f"; drafts: {drafts}" if drafts else ""
    )
    found = Footprint(**{k: v for k, v in told["predicted"].items() if k != "total"})
    return f"within {_mb(told['budget_bytes'])}: {words}; predicted {written(found)}"


def _mb(size: int) -> str:
    return f"{size / 1e6:.1f} MB"


def _fitting(room: Room, asked: int, limit: int) -> Iterator[tuple[int, int]]:
    """For each batch that fits, the largest first, with the longest drafts that do."""
    longest = max(1, *room.asked.values())
    for batch in range(asked, 0, -1):
        low, high = 0, longest  # what takes more with each draft token is searched by halves
        while low < high:
            middle = -(-(low + high) // 2)
            fits = room.footprint(batch, middle).total <= limit
            low, high = (middle, high) if fits else (low, middle - 1)
        if low:
            yield batch, low


def _key(method: Method) -> str | None:
    """The parameter that bounds a method's draft; None for one that drafts nothing."""
    params = method.params
    if isinstance(params, LengthParams):
        return "length" if isinstance(params.length, int) else "max"
    fields = type(params).model_fields
    return next((key for key in ("nodes", "length") if key in fields), None)


def _draft(arm: Arm) -> int:
    """Most draft tokens a step. Raises MethodFault where that is chosen later."""
    key = _key(arm.method)
    most = 0 if key is None else getattr(arm.method.params, key)
    if not isinstance(most, int):
        raise MethodFault(f"{arm.label}: {key}={most} is chosen as the run begins; give a number")
    return most


def _limited(arm: Arm, most: int) -> Method:
    key, method = _key(arm.method), arm.method
    if key is None:
        return method
    return type(method)(method.params.model_copy(update={key: most}))


def _prompts(plan: Plan, budget: int) -> Iterator[int]:
    """The longest prompt of each question: all its turns, with the longest answers in between."""
    tokenizer, label = tokenizer_of(plan.target), plan.target.label
    for question in plan.questions:
        lengths: list[int] = []
        for turn, before in zip(question.turns, _before(question), strict=True):
            messages = conversation([turn], [], before)
            try:
                ids = render(tokenizer, messages, raw=plan.config.raw, label=label)
            except PromptError as fault:
                if not lengths:
                    message = f"prompt {question.prompt_id}: {fault.message}"
                    raise PromptError(message, fault.hint) from fault
                ids = render(tokenizer, messages, raw=True, label=label)
            lengths.append(len(ids))
        yield sum(lengths) + (len(lengths) - 1) * budget


def _before(question: Question) -> list[Sequence[Message]]:
    """What stands before each turn, but for the turns themselves."""
    return [question.before, *([()] * (len(question.turns) - 1))]


def _groups(plan: Plan, batch: int, prompts: Sequence[int]) -> list[list[int]]:
    """The prompts that are decoded together, in each turn."""
    asked = [(len(each.turns), n) for each, n in zip(plan.questions, prompts, strict=True)]
    size = len(asked) if plan.loads else wave(batch)
    dealt = [asked[first : first + size] for first in range(0, len(asked), size)]
    return [
        [n for turns, n in own if turns >= turn]
        for own in dealt
        for turn in range(1, max(turns for turns, _ in own) + 1)
    ]

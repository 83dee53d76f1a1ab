"""`--memory-budget`: the largest settings that a run's memory has room for, chosen beforehand.

The memory model of SpecMemo (Yildirim, Chen, 2025, arXiv:2506.01986), for this engine: weights of
target and draft, rows of keys and values that are preallocated for every seat, and at the peak what
a forward has in hand: activations of its rows, and the candidates' logits and distributions. Rows
are counted exactly, by having the methods take their states from decoders that compute nothing.
"""

from __future__ import annotations

import heapq
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, Self

import torch

from specbench_cli.config.run import RunConfig, nbytes
from specbench_cli.engine.batch import Batch
from specbench_cli.engine.drafting.length_params import LengthParams
from specbench_cli.engine.method import Method
from specbench_cli.engine.models.attention import FEW
from specbench_cli.engine.models.checkpoint import config_facts, read_config, text_config
from specbench_cli.engine.models.fused import fits
from specbench_cli.engine.models.layers import HEAD_COPY_UP_TO
from specbench_cli.engine.models.linear import form_for
from specbench_cli.engine.models.plan import MAX_SCRATCH
from specbench_cli.engine.simulation import Script, ScriptedDecoder
from specbench_cli.engine.types import Rule
from specbench_cli.engine.verify.sampling import Sampling
from specbench_cli.engine.workspace import Workspace
from specbench_cli.errors import MethodFault, PromptError, UsageError
from specbench_cli.measure.bench import readable, tokenizer_of
from specbench_cli.measure.placement import choose_device
from specbench_cli.plan.method_run import MethodRun
from specbench_cli.plan.plan import Plan, make_plan, wave
from specbench_cli.tasks import Question, build_messages, render_prompt
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
        self.asked = {method_run.label: _draft(method_run) for method_run in plan.method_runs}

    def footprint(self, batch: int, most: int) -> Footprint:
        """Of a batch whose rows draft at most so many tokens a step."""
        plan = self._plan
        methods = [
            (_limited(method_run, min(asked, most)), min(asked, most))
            for method_run, asked in zip(plan.method_runs, self.asked.values(), strict=True)
        ]
        groups = _groups(plan, batch, self._prompts)
        chunk, rule = plan.config.prefill_chunk, plan.config.rule
        return footprint(methods, self._sizes, groups, self._budget, batch, chunk, rule)

    def tokens(self, batch: int, most: int) -> float:
        """Tokens that a step of each row is expected to bring, all rows together."""
        return batch * sum(
            expected(
                getattr(method_run.method.params, "acceptance", CHANCE),
                min(self.asked[method_run.label], most),
                tree="nodes" in type(method_run.method.params).model_fields,
            )
            for method_run in self._plan.method_runs
        )

    def limited(self, most: int) -> list[dict[str, Any]]:
        """The rows of a configuration that draft at most so many tokens."""
        rows = []
        for row, method_run in zip(self._plan.config.methods, self._plan.method_runs, strict=True):
            key, asked = _key(method_run.method), self.asked[method_run.label]
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


def _draft(method_run: MethodRun) -> int:
    """Most draft tokens a step. Raises MethodFault where that is chosen later."""
    key = _key(method_run.method)
    most = 0 if key is None else getattr(method_run.method.params, key)
    if not isinstance(most, int):
        raise MethodFault(
            f"{method_run.label}: {key}={most} is chosen as the run begins; give a number"
        )
    return most


def _limited(method_run: MethodRun, most: int) -> Method:
    key, method = _key(method_run.method), method_run.method
    if key is None:
        return method
    return type(method)(method.params.model_copy(update={key: most}))


def _prompts(plan: Plan, budget: int) -> Iterator[int]:
    """The longest prompt of each question: all its turns, with the longest answers in between."""
    tokenizer, label = tokenizer_of(plan.target), plan.target.label
    for question in plan.questions:
        lengths: list[int] = []
        for turn, before in zip(question.turns, _before(question), strict=True):
            messages = build_messages([turn], [], before)
            try:
                ids = render_prompt(tokenizer, messages, raw=plan.config.raw, label=label)
            except PromptError as fault:
                if not lengths:
                    message = f"prompt {question.prompt_id}: {fault.message}"
                    raise PromptError(message, fault.hint) from fault
                ids = render_prompt(tokenizer, messages, raw=True, label=label)
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


# ---- the footprint of a batch --------------------------------------------------------------------

NOISE_BLOCK, NOISE_NUMBERS, NOISE_PARTS = 32, 1 << 20, 8
"""Coupled decoding makes noise of so many positions at once, or fewer of a large vocabulary, by way
of so many float64 of each; see `sampling.Noise`."""


@dataclass(frozen=True, slots=True)
class Sizes:
    """What a model takes, in bytes.

    weights: of all, copies included. row: of the keys and values of a token. scratch: of the
    buffers that a token of a forward has (`plan.Scratch`). moving: of what is made beside them in a
    layer: rows of the hidden size before and after, and the MLP's two halves, where their product
    is of a form that cannot write into a buffer. logits: of a row of logits. vocab: how many there
    are.
    """

    weights: int
    row: int
    scratch: int
    moving: int
    logits: int
    vocab: int

    @classmethod
    def of(cls, folder: Path, device: torch.device, dtype: torch.dtype) -> Self:
        """Of a checkpoint, by its config and the shapes of its tensors.

        Raises:
            MethodFault: it does not run through our own decoder.
        """
        config = read_config(folder)
        if not fits(config):
            raise MethodFault(f"{folder.name} runs through transformers' own module")
        facts, text = config_facts(folder), text_config(config)
        size, hidden, inner = dtype.itemsize, text.hidden_size, text.intermediate_size
        heads = text.num_attention_heads
        width = getattr(text, "head_dim", None) or hidden // heads
        kv = 2 * text.num_key_value_heads * width
        weights = facts.parameters * size
        embedding = torch.empty(facts.vocab_size, hidden, dtype=dtype, device=device)  # untouched
        copied = text.tie_word_embeddings and device.type == "cpu"
        if copied and embedding.numel() <= HEAD_COPY_UP_TO[form_for(embedding.t())]:
            weights += embedding.nbytes
        gate_up = torch.empty(hidden, 2 * inner, dtype=dtype, device=device)  # untouched, too
        halves = {"plain": 0, "tiled": inner}.get(form_for(gate_up), 2 * inner)
        return cls(
            weights=weights,
            row=text.num_hidden_layers * kv * size,
            scratch=(2 * inner + 2 * heads * width + kv + hidden) * size,
            moving=(halves + 3 * hidden) * size,
            logits=facts.vocab_size * size,
            vocab=facts.vocab_size,
        )


@dataclass(frozen=True, slots=True)
class Footprint:
    """Bytes at the peak. weights, draft: of the target, of the draft model; rows: both ones' keys
    and values; activations: of the largest forward; candidates: logits, distributions, noise of
    drafts."""

    weights: int
    draft: int
    rows: int
    activations: int
    candidates: int

    @property
    def total(self) -> int:
        """All of it."""
        return sum(asdict(self).values())


def footprint(
    methods: Sequence[tuple[Method, int]],
    sizes: Mapping[str, Sizes],
    groups: Sequence[Sequence[int]],
    budget: int,
    batch: int,
    chunk: int,
    rule: Rule,
) -> Footprint:
    """What rows of a run hold, one after another in one process; states are kept between them.

    Args:
        methods: each with its most draft tokens a step.
        sizes: of "target", and of "draft" if a method needs one.
        groups: lengths of the prompts that are decoded together, in their order; budget: most new
            tokens.
        batch: sequences that take part in a step. chunk: most tokens of prompts beside them.
    Raises:
        MethodFault: a method drafts by something else than a draft model or a lookup.
    """
    prompts = max(groups, key=len)
    scripts = [Script((at,) * n, (0,), (False,), budget) for at, n in enumerate(prompts)]
    decoders = {
        name: ScriptedDecoder(name, scripts, perfect=True, row_bytes=each.row)
        for name, each in sizes.items()
    }
    longest = max(map(max, groups))
    workspace = Workspace(decoders, longest + budget, costs=lambda model, rows, *step: 1.0)
    requests = [script.request(place) for place, script in enumerate(scripts)]
    for method, _ in methods:
        if method.artifacts() or method.models() or not method.batches:
            raise MethodFault(f"what {type(method).name} holds beside a draft model is not known")
        for n in {1, *map(len, groups)}:  # a row is warmed up alone
            held = method.held(batch)
            for session in Batch(
                workspace, requests[:n], Sampling(), size=batch, slots=held
            ).join():
                type(method)(method.params).start(session)
    target = sizes["target"]
    most = max(nodes for _, nodes in methods)
    step = batch * (most + 1)
    # Neighbours are prefilled together: the first ones, and others where as many end at once.
    seats = max(method.held(batch) for method, _ in methods)
    joining = max(
        (group[first : first + seats] for group in groups for first in range(len(group))), key=sum
    )
    # Buffers of short blocks are kept: of prompts, and of a step or two.
    short = sorted({n for group in groups for n in group if n <= FEW})[-MAX_SCRATCH:]
    kept = (sum(short) + 2 * step) * target.scratch
    distributions = noise = 0
    if rule in ("rejection", "block"):
        distributions = 4 * target.vocab * (2 * (most + 1) + batch * most)
    elif rule == "coupled":
        rows = max(1, min(NOISE_BLOCK, NOISE_NUMBERS // target.vocab))
        block = rows * target.vocab
        noise = block * 4 * min(2, -(-budget // rows)) * batch  # of each one's last two blocks
        distributions = block * 8 * NOISE_PARTS
    long = sum(joining) if max(joining) > FEW else 0
    prefill = sum(joining) * target.moving + long * target.scratch, len(joining) * target.logits
    # A step's logits are held until the next one's are there.
    beside = min(chunk, longest) if max(map(len, groups)) > seats else 0
    verify = (step + beside) * target.moving, 2 * step * target.logits
    decide = 0, verify[1] + distributions
    activations, candidates = max(prefill, verify, decide, key=sum)
    return Footprint(
        weights=target.weights,
        draft=sizes["draft"].weights if "draft" in sizes else 0,
        rows=workspace.state_bytes,
        activations=activations + kept,
        candidates=candidates + noise,
    )


def expected(chance: float, nodes: int, *, tree: bool) -> float:
    """Tokens that a step brings with so many draft tokens: the target's own and, of a chain or of
    the best tree, the sum of the chances that all up to a node stand.

    A node's best child stands with `chance`, its next one with that of the rest, and so on: the
    best tree takes the nodes of the largest products, and with a node always its parent.
    """
    total, open_ = 1.0, [(-chance, chance)]
    for _ in range(nodes):
        _, product = heapq.heappop(open_)
        total += product
        heapq.heappush(open_, (-product * chance, product * chance))
        if tree:
            heapq.heappush(open_, (-product * (1 - chance), product * (1 - chance)))
    return total

"""`--memory-budget`: choose the largest batch and drafts that fit, before the run.

This is the memory model of SpecMemo (Yildirim, Chen, 2025, arXiv:2506.01986) for this engine. It
counts the weights of target and draft model, and preallocated keys and values of every batch slot.
At the peak it adds the activations of a forward, and the logits and distributions of the
candidates. Rows are counted exactly: the methods allocate their states from decoders that compute
nothing.
"""

from __future__ import annotations

import heapq
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, Self

import torch

from specbench_cli.config.run import RunConfig, parse_size
from specbench_cli.engine.batch import Batch
from specbench_cli.engine.drafting.length_params import LengthParams
from specbench_cli.engine.method import Method
from specbench_cli.engine.models.attention import MAX_FEW
from specbench_cli.engine.models.checkpoint import read_checkpoint_facts, read_config, text_config
from specbench_cli.engine.models.forward_plan import MAX_SCRATCH
from specbench_cli.engine.models.fused import fits
from specbench_cli.engine.models.layers import MAX_HEAD_COPY
from specbench_cli.engine.models.linear import choose_backend
from specbench_cli.engine.simulation import ScriptedDecoder, ScriptedRequest
from specbench_cli.engine.types import Rule
from specbench_cli.engine.verify.sampling import Sampling
from specbench_cli.engine.workspace import Workspace
from specbench_cli.errors import MethodFault, PromptError, UsageError
from specbench_cli.measure.bench import load_tokenizer, read_checkpoint
from specbench_cli.measure.placement import choose_device
from specbench_cli.plan.method_run import MethodRun
from specbench_cli.plan.plan import Plan, make_plan, prompts_per_batch
from specbench_cli.tasks import Question, build_messages, render_prompt
from specbench_cli.tasks.schema import Message

DEFAULT_ACCEPTANCE = 0.7
"""Acceptance rate of a draft token if nothing is known: as in `LengthParams.acceptance`."""


class MemoryModel:
    """Memory of a run, as a function of its settings."""

    def __init__(self, config: RunConfig) -> None:
        self._plan = plan = make_plan(config)
        device, dtype = choose_device(config.main_device), getattr(torch, config.dtype)
        self._sizes = {
            role: read_checkpoint(lambda path: ModelSizes.read(path, device, dtype), checkpoint)
            for role, checkpoint in plan.checkpoints.items()
        }
        self._budget = max(map(plan.max_new_tokens, plan.questions))
        self._prompt_lengths = list(_prompt_lengths(plan, self._budget))
        self.configured_drafts = {
            method_run.label: _draft_size(method_run) for method_run in plan.method_runs
        }

    def compute_footprint(self, batch: int, max_draft: int) -> Footprint:
        """Return the footprint of a batch whose methods draft at most `most` tokens per step."""
        plan = self._plan
        methods = [
            (_limit_draft(method_run, min(asked, max_draft)), min(asked, max_draft))
            for method_run, asked in zip(
                plan.method_runs, self.configured_drafts.values(), strict=True
            )
        ]
        groups = _batch_prompt_lengths(plan, batch, self._prompt_lengths)
        chunk, rule = plan.config.prefill_chunk, plan.config.rule
        return compute_footprint(methods, self._sizes, groups, self._budget, batch, chunk, rule)

    def expected_tokens(self, batch: int, max_draft: int) -> float:
        """Return the expected tokens per step, summed over all methods."""
        return batch * sum(
            expected_tokens(
                getattr(method_run.method.params, "acceptance", DEFAULT_ACCEPTANCE),
                min(self.configured_drafts[method_run.label], max_draft),
                tree="nodes" in type(method_run.method.params).model_fields,
            )
            for method_run in self._plan.method_runs
        )

    def limit_methods(self, max_draft: int) -> list[dict[str, Any]]:
        """Return the methods of the configuration with drafts of at most `most` tokens."""
        rows = []
        for row, method_run in zip(self._plan.config.methods, self._plan.method_runs, strict=True):
            key, asked = _draft_param(method_run.method), self.configured_drafts[method_run.label]
            changed = {} if key is None or asked <= max_draft else {key: max_draft}
            rows.append({**row.model_dump(), "params": {**row.params, **changed}})
        return rows


def fit_to_budget(config: RunConfig) -> tuple[RunConfig, dict[str, Any] | None]:
    """Return a configuration that fits into its memory budget, and the manifest entry of the
    choice.

    The configured batch, draft lengths and tree sizes are upper limits. Among the settings that
    fit, the one with the most expected tokens per step is chosen; of two equal ones the larger
    batch. Without a budget the configuration is unchanged.

    Raises:
        UsageError: nothing fits, or the memory of a method cannot be predicted.
    """
    if config.memory_budget is None:
        return config, None
    limit = parse_size(config.memory_budget)
    try:
        model = MemoryModel(config)
        least = model.compute_footprint(1, 1)
        if least.total > limit:
            raise UsageError(
                f"--memory-budget {config.memory_budget} is impossible: batch 1 with drafts of one"
                f" token takes {format_footprint(least)}",
                hint=f"--memory-budget {-(-least.total // 1_000_000)}MB or more, a smaller --target"
                " or --draft, --dtype bfloat16, fewer methods, or shorter outputs"
                " (--max-new-tokens)",
            )
        batch, most = max(
            _fitting_settings(model, config.batch, limit),
            key=lambda each: model.expected_tokens(*each),
        )
        chosen = model.compute_footprint(batch, most)
    except MethodFault as fault:
        raise UsageError(
            f"--memory-budget: {fault.message}", hint="leave that row out, or --memory-budget"
        ) from fault
    rows = model.limit_methods(most)
    facts = {
        "budget_bytes": limit,
        "asked": {"batch": config.batch, "drafts": model.configured_drafts},
        "chosen": {
            "batch": batch,
            "drafts": {label: min(asked, most) for label, asked in model.configured_drafts.items()},
        },
        "predicted": {**asdict(chosen), "total": chosen.total},
    }
    data = {**config.model_dump(), "batch": batch, "methods": rows}
    return RunConfig.model_validate(data), facts


def format_footprint(found: Footprint) -> str:
    """Format a footprint for the user."""
    parts = ", ".join(f"{name} {_mb(size)}" for name, size in asdict(found).items() if size)
    return f"{_mb(found.total)} ({parts})"


def describe_choice(facts: Mapping[str, Any]) -> str:
    """Describe the chosen settings for the user."""
    asked, chosen = facts["asked"], facts["chosen"]
    drafts = ", ".join(
        f"{label} {most} of {asked['drafts'][label]}"
        for label, most in chosen["drafts"].items()
        if asked["drafts"][label]
    )
    words = f"batch {chosen['batch']} of {asked['batch']}" + (
        f"; drafts: {drafts}" if drafts else ""
    )
    found = Footprint(**{k: v for k, v in facts["predicted"].items() if k != "total"})
    return f"within {_mb(facts['budget_bytes'])}: {words}; predicted {format_footprint(found)}"


def _mb(size: int) -> str:
    return f"{size / 1e6:.1f} MB"


def _fitting_settings(model: MemoryModel, max_batch: int, limit: int) -> Iterator[tuple[int, int]]:
    """Yield each batch size that fits, largest first, with the longest drafts that fit."""
    longest = max(1, *model.configured_drafts.values())
    for batch in range(max_batch, 0, -1):
        low, high = 0, longest  # binary search: memory grows with the draft length
        while low < high:
            middle = -(-(low + high) // 2)
            fits = model.compute_footprint(batch, middle).total <= limit
            low, high = (middle, high) if fits else (low, middle - 1)
        if low:
            yield batch, low


def _draft_param(method: Method) -> str | None:
    """Return the parameter that limits a method's draft; None if the method does not draft."""
    params = method.params
    if isinstance(params, LengthParams):
        return "length" if isinstance(params.length, int) else "max"
    fields = type(params).model_fields
    return next((key for key in ("nodes", "length") if key in fields), None)


def _draft_size(method_run: MethodRun) -> int:
    """Return the maximum number of draft tokens per step. Raise MethodFault if it is unknown."""
    key = _draft_param(method_run.method)
    most = 0 if key is None else getattr(method_run.method.params, key)
    if not isinstance(most, int):
        raise MethodFault(
            f"{method_run.label}: {key}={most} is chosen as the run begins; give a number"
        )
    return most


def _limit_draft(method_run: MethodRun, max_draft: int) -> Method:
    key, method = _draft_param(method_run.method), method_run.method
    if key is None:
        return method
    return type(method)(method.params.model_copy(update={key: max_draft}))


def _prompt_lengths(plan: Plan, budget: int) -> Iterator[int]:
    """Yield the maximum prompt length of each question: all turns, with the longest answers in
    between."""
    tokenizer, label = load_tokenizer(plan.target), plan.target.label
    for question in plan.questions:
        lengths: list[int] = []
        for turn, before in zip(question.turns, _context_messages(question), strict=True):
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


def _context_messages(question: Question) -> list[Sequence[Message]]:
    """Return the messages before each turn, without earlier turns."""
    return [question.before, *([()] * (len(question.turns) - 1))]


def _batch_prompt_lengths(plan: Plan, batch: int, prompts: Sequence[int]) -> list[list[int]]:
    """Return the prompt lengths of each batch, in each turn."""
    asked = [(len(each.turns), n) for each, n in zip(plan.questions, prompts, strict=True)]
    size = len(asked) if plan.loads else prompts_per_batch(batch)
    dealt = [asked[first : first + size] for first in range(0, len(asked), size)]
    return [
        [n for turns, n in own if turns >= turn]
        for own in dealt
        for turn in range(1, max(turns for turns, _ in own) + 1)
    ]


# ---- the footprint of a batch --------------------------------------------------------------------

NOISE_BLOCK, NOISE_NUMBERS, NOISE_PARTS = 32, 1 << 20, 8
"""Coupled sampling computes noise for blocks of positions, with fewer positions if the vocabulary
is large, through several float64 arrays each; see `sampling.Noise`."""


@dataclass(frozen=True, slots=True)
class ModelSizes:
    """Memory of a model in bytes.

    weights: All weights with copies.
    row: Keys and values of a token.
    scratch: Buffers of a token in a forward (`plan.Scratch`).
    temporaries: Other tensors of a layer: rows of the hidden size before and after it, and the
        MLP's two halves if their product cannot write into a buffer.
    logits: A row of logits.
    vocab: Number of logits.
    """

    weights: int
    row: int
    scratch: int
    temporaries: int
    logits: int
    vocab: int

    @classmethod
    def read(cls, folder: Path, device: torch.device, dtype: torch.dtype) -> Self:
        """Read the sizes of a checkpoint from its config and the shapes of its tensors.

        Raises:
            MethodFault: the checkpoint does not run in our own decoder.
        """
        config = read_config(folder)
        if not fits(config):
            raise MethodFault(f"{folder.name} runs through transformers' own module")
        facts, text = read_checkpoint_facts(folder), text_config(config)
        size, hidden, inner = dtype.itemsize, text.hidden_size, text.intermediate_size
        heads = text.num_attention_heads
        width = getattr(text, "head_dim", None) or hidden // heads
        kv = 2 * text.num_key_value_heads * width
        weights = facts.parameters * size
        embedding = torch.empty(facts.vocab_size, hidden, dtype=dtype, device=device)  # not filled
        copied = text.tie_word_embeddings and device.type == "cpu"
        if copied and embedding.numel() <= MAX_HEAD_COPY[choose_backend(embedding.t())]:
            weights += embedding.nbytes
        gate_up = torch.empty(hidden, 2 * inner, dtype=dtype, device=device)  # not filled
        halves = {"plain": 0, "tiled": inner}.get(choose_backend(gate_up), 2 * inner)
        return cls(
            weights=weights,
            row=text.num_hidden_layers * kv * size,
            scratch=(2 * inner + 2 * heads * width + kv + hidden) * size,
            temporaries=(halves + 3 * hidden) * size,
            logits=facts.vocab_size * size,
            vocab=facts.vocab_size,
        )


@dataclass(frozen=True, slots=True)
class Footprint:
    """Bytes at the peak.

    weights, draft: Weights of the target and of the draft model.
    rows: Keys and values of both.
    activations: The largest forward.
    candidates: Logits, distributions and noise of drafts.
    """

    weights: int
    draft: int
    rows: int
    activations: int
    candidates: int

    @property
    def total(self) -> int:
        """Sum of all parts."""
        return sum(asdict(self).values())


def compute_footprint(
    methods: Sequence[tuple[Method, int]],
    sizes: Mapping[str, ModelSizes],
    groups: Sequence[Sequence[int]],
    budget: int,
    batch: int,
    chunk: int,
    rule: Rule,
) -> Footprint:
    """Return the memory of methods that run one after another in one process, which keeps their
    states.

    Args:
        methods: Each with its maximum number of draft tokens per step.
        sizes: Sizes of "target", and of "draft" if a method needs one.
        groups: Prompt lengths of each batch, in their order.
        budget: Maximum number of new tokens.
        batch: Number of sequences in a step.
        chunk: Maximum number of prompt tokens in such a step.

    Raises:
        MethodFault: a method drafts neither with a draft model nor with a lookup.
    """
    prompts = max(groups, key=len)
    scripts = [ScriptedRequest((at,) * n, (0,), (False,), budget) for at, n in enumerate(prompts)]
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
        for n in {1, *map(len, groups)}:  # the warm-up uses a single sequence
            held = method.max_sequences(batch)
            for session in Batch(
                workspace, requests[:n], Sampling(), size=batch, slots=held
            ).join():
                type(method)(method.params).start(session)
    target = sizes["target"]
    most = max(nodes for _, nodes in methods)
    step = batch * (most + 1)
    # Adjacent prompts are prefilled together: the first ones, and later ones if several sequences
    # end at once.
    slots = max(method.max_sequences(batch) for method, _ in methods)
    joining = max(
        (group[first : first + slots] for group in groups for first in range(len(group))), key=sum
    )
    # Buffers of short blocks are kept: those of prompts, and those of one or two steps.
    short = sorted({n for group in groups for n in group if n <= MAX_FEW})[-MAX_SCRATCH:]
    kept = (sum(short) + 2 * step) * target.scratch
    distributions = noise = 0
    if rule in ("rejection", "block"):
        distributions = 4 * target.vocab * (2 * (most + 1) + batch * most)
    elif rule == "coupled":
        rows = max(1, min(NOISE_BLOCK, NOISE_NUMBERS // target.vocab))
        block = rows * target.vocab
        noise = block * 4 * min(2, -(-budget // rows)) * batch  # last two blocks of each sequence
        distributions = block * 8 * NOISE_PARTS
    long = sum(joining) if max(joining) > MAX_FEW else 0
    prefill = (
        sum(joining) * target.temporaries + long * target.scratch,
        len(joining) * target.logits,
    )
    # The logits of a step are kept until those of the next step exist.
    beside = min(chunk, longest) if max(map(len, groups)) > slots else 0
    verify = (step + beside) * target.temporaries, 2 * step * target.logits
    decide = 0, verify[1] + distributions
    activations, candidates = max(prefill, verify, decide, key=sum)
    return Footprint(
        weights=target.weights,
        draft=sizes["draft"].weights if "draft" in sizes else 0,
        rows=workspace.state_bytes,
        activations=activations + kept,
        candidates=candidates + noise,
    )


def expected_tokens(chance: float, nodes: int, *, tree: bool) -> float:
    """Return the expected number of tokens of a step with `nodes` draft tokens.

    It is the target's own token plus the sum of the probabilities that a node and all its ancestors
    are accepted, for a chain or the best tree. A node's best child is accepted with `chance`, the
    next one with the same chance of the rest, and so on. The best tree has the nodes with the
    largest products.
    """
    total, open_ = 1.0, [(-chance, chance)]
    for _ in range(nodes):
        _, product = heapq.heappop(open_)
        total += product
        heapq.heappush(open_, (-product * chance, product * chance))
        if tree:
            heapq.heappush(open_, (-product * (1 - chance), product * (1 - chance)))
    return total

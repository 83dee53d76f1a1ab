"""Choice of batch size and draft lengths that fit a memory budget (`--memory-budget`).

A memory model predicts the peak memory of a run before it starts. It is the model of SpecMemo
(Yildirim, Chen, 2025, arXiv:2506.01986), applied to this engine. The prediction is the sum of

- the weights of target and draft model,
- the preallocated KV caches of all sequences in a batch,
- the activations of the largest forward, and
- the logits and distributions of the draft tokens.

The size of keys and values is exact. To find it, each method allocates its states in decoders that
have no weights and compute nothing.
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
"""Assumed acceptance rate of a draft token, the same as in `LengthParams.acceptance`."""


class MemoryModel:
    """Predictor of the memory of a run for different batch sizes and draft lengths.

    Attributes:
        configured_drafts: Maximum number of draft tokens per step that the configuration sets, by
            method.
    """

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
        """Return the predicted peak memory of the run.

        Args:
            batch: Number of sequences in a step.
            max_draft: Maximum number of draft tokens per step. It applies to all methods.
        """
        plan = self._plan
        methods = [
            (_limit_draft(method_run, min(configured, max_draft)), min(configured, max_draft))
            for method_run, configured in zip(
                plan.method_runs, self.configured_drafts.values(), strict=True
            )
        ]
        groups = _batch_prompt_lengths(plan, batch, self._prompt_lengths)
        chunk, rule = plan.config.prefill_chunk, plan.config.rule
        return compute_footprint(methods, self._sizes, groups, self._budget, batch, chunk, rule)

    def expected_tokens(self, batch: int, max_draft: int) -> float:
        """Return the expected number of tokens per step, summed over all methods.

        Args:
            batch: Number of sequences in a step.
            max_draft: Maximum number of draft tokens per step. It applies to all methods.
        """
        return batch * sum(
            expected_tokens(
                getattr(method_run.method.params, "acceptance", DEFAULT_ACCEPTANCE),
                min(self.configured_drafts[method_run.label], max_draft),
                tree="nodes" in type(method_run.method.params).model_fields,
            )
            for method_run in self._plan.method_runs
        )

    def limit_methods(self, max_draft: int) -> list[dict[str, Any]]:
        """Return the configured methods, each limited to `max_draft` draft tokens per step."""
        rows = []
        for row, method_run in zip(self._plan.config.methods, self._plan.method_runs, strict=True):
            key = _draft_param(method_run.method)
            configured = self.configured_drafts[method_run.label]
            changed = {} if key is None or configured <= max_draft else {key: max_draft}
            rows.append({**row.model_dump(), "params": {**row.params, **changed}})
        return rows


def fit_to_budget(config: RunConfig) -> tuple[RunConfig, dict[str, Any] | None]:
    """Return a configuration that fits into its memory budget, and the manifest entry about it.

    The configured batch size, draft lengths and tree sizes are upper limits. Among all settings
    that fit, choose the setting with the most expected tokens per step. If two settings are equal,
    choose the larger batch. Without a memory budget, the configuration is not changed.

    Raises:
        UsageError: no setting fits into the budget, or the memory of a method cannot be
            predicted.
    """
    if config.memory_budget is None:
        return config, None
    limit = parse_size(config.memory_budget)
    try:
        model = MemoryModel(config)
        least = model.compute_footprint(1, 1)
        if least.total > limit:
            raise UsageError(
                f"--memory-budget {config.memory_budget} is too small: batch size 1 with drafts of"
                f" one token needs {format_footprint(least)}",
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
            f"--memory-budget: {fault.message}", hint="leave out this method or --memory-budget"
        ) from fault
    rows = model.limit_methods(most)
    facts = {
        "budget_bytes": limit,
        "asked": {"batch": config.batch, "drafts": model.configured_drafts},
        "chosen": {
            "batch": batch,
            "drafts": {
                label: min(configured, most)
                for label, configured in model.configured_drafts.items()
            },
        },
        "predicted": {**asdict(chosen), "total": chosen.total},
    }
    data = {**config.model_dump(), "batch": batch, "methods": rows}
    return RunConfig.model_validate(data), facts


def format_footprint(found: Footprint) -> str:
    """Return a predicted memory footprint as text in MB, with its parts."""
    parts = ", ".join(f"{name} {_mb(size)}" for name, size in asdict(found).items() if size)
    return f"{_mb(found.total)} ({parts})"


def describe_choice(facts: Mapping[str, Any]) -> str:
    """Return the chosen batch size and draft lengths as text.

    Args:
        facts: Manifest entry of the memory budget.
    """
    configured, chosen = facts["asked"], facts["chosen"]
    drafts = ", ".join(
        f"{label} {most} of {configured['drafts'][label]}"
        for label, most in chosen["drafts"].items()
        if configured["drafts"][label]
    )
    words = f"batch {chosen['batch']} of {configured['batch']}" + (
        f"; drafts: {drafts}" if drafts else ""
    )
    found = Footprint(**{k: v for k, v in facts["predicted"].items() if k != "total"})
    return f"within {_mb(facts['budget_bytes'])}: {words}; predicted {format_footprint(found)}"


def _mb(size: int) -> str:
    return f"{size / 1e6:.1f} MB"


def _fitting_settings(model: MemoryModel, max_batch: int, limit: int) -> Iterator[tuple[int, int]]:
    """Yield (batch size, draft length) for each batch size that fits, largest batch first.

    The draft length is the largest draft length that fits together with this batch size.
    """
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
    """Return the name of the parameter that limits the draft of a method.

    None if there is no such parameter.
    """
    params = method.params
    if isinstance(params, LengthParams):
        return "length" if isinstance(params.length, int) else "max"
    fields = type(params).model_fields
    return next((key for key in ("nodes", "length") if key in fields), None)


def _draft_size(method_run: MethodRun) -> int:
    """Return the maximum number of draft tokens per step of a method.

    Raises:
        MethodFault: the method chooses its number of draft tokens when the run starts.
    """
    key = _draft_param(method_run.method)
    most = 0 if key is None else getattr(method_run.method.params, key)
    if not isinstance(most, int):
        raise MethodFault(
            f"{method_run.label}: {key}={most} is chosen when the run starts; set a number"
        )
    return most


def _limit_draft(method_run: MethodRun, max_draft: int) -> Method:
    key, method = _draft_param(method_run.method), method_run.method
    if key is None:
        return method
    return type(method)(method.params.model_copy(update={key: max_draft}))


def _prompt_lengths(plan: Plan, budget: int) -> Iterator[int]:
    """Yield the maximum prompt length of each question, in tokens.

    The longest prompt of a question is that of its last turn. It contains all turns, and an answer
    of at most `budget` tokens to each earlier turn.
    """
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
    """Return the messages that precede each turn of a question.

    Before the first turn these are the messages of the question's context. Later turns have
    none.
    """
    return [question.before, *([()] * (len(question.turns) - 1))]


def _batch_prompt_lengths(plan: Plan, batch: int, prompts: Sequence[int]) -> list[list[int]]:
    """Return the prompt lengths of each batch. Each turn of the questions gives one batch.

    Args:
        plan: Plan of the run.
        batch: Number of sequences in a step.
        prompts: Maximum prompt length of each question.
    """
    questions = [(len(each.turns), n) for each, n in zip(plan.questions, prompts, strict=True)]
    size = len(questions) if plan.loads else prompts_per_batch(batch)
    batches = [questions[first : first + size] for first in range(0, len(questions), size)]
    return [
        [n for turns, n in members if turns >= turn]
        for members in batches
        for turn in range(1, max(turns for turns, _ in members) + 1)
    ]


# ---- the footprint of a batch --------------------------------------------------------------------

NOISE_BLOCK, NOISE_NUMBERS, NOISE_PARTS = 32, 1 << 20, 8
"""Memory of the random noise in coupled sampling (`sampling.Noise`): positions in a block, maximum
numbers in a block, and float64 arrays that exist while a block is computed."""


@dataclass(frozen=True, slots=True)
class ModelSizes:
    """Memory of a model in bytes.

    weights: All weights, including copies.
    row: Keys and values of one token in the KV cache.
    scratch: Preallocated buffers of a forward, per token (`plan.Scratch`).
    temporaries: Other tensors of a layer, per token. These are the hidden states before and after
        the layer. Results of the MLP are added if they cannot be written into a buffer.
    logits: Logits of one position.
    vocab: Number of tokens in the vocabulary. This is not a size in bytes.
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
            MethodFault: specbench's own decoder does not support the checkpoint.
        """
        config = read_config(folder)
        if not fits(config):
            raise MethodFault(
                f"the memory of {folder.name} cannot be predicted, because it runs in transformers"
            )
        facts, text = read_checkpoint_facts(folder), text_config(config)
        size, hidden, inner = dtype.itemsize, text.hidden_size, text.intermediate_size
        heads = text.num_attention_heads
        width = getattr(text, "head_dim", None) or hidden // heads
        kv = 2 * text.num_key_value_heads * width
        weights = facts.parameters * size
        embedding = torch.empty(
            facts.vocab_size, hidden, dtype=dtype, device=device
        )  # only its shape is used
        copied = text.tie_word_embeddings and device.type == "cpu"
        if copied and embedding.numel() <= MAX_HEAD_COPY[choose_backend(embedding.t())]:
            weights += embedding.nbytes
        gate_up = torch.empty(
            hidden, 2 * inner, dtype=dtype, device=device
        )  # only its shape is used
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
    """Predicted peak memory of a run, in bytes.

    weights: Weights of the target.
    draft: Weights of the draft model.
    rows: KV caches of the target and the draft model.
    activations: Activations of the largest forward.
    candidates: Logits, distributions and random noise of the draft tokens.
    """

    weights: int
    draft: int
    rows: int
    activations: int
    candidates: int

    @property
    def total(self) -> int:
        """Sum of all parts of the footprint."""
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
    """Return the predicted peak memory of methods that run one after another in one process.

    The process keeps the states of all methods.

    Args:
        methods: Pairs of a method and its maximum number of draft tokens per step.
        sizes: Sizes of the models "target" and "draft". The size of "draft" may be missing.
        groups: Batches of prompts in the order of decoding. Each batch is a list of prompt lengths.
        budget: Maximum number of new tokens of a prompt.
        batch: Maximum number of sequences in a step.
        chunk: Maximum number of prompt tokens that a step also prefills.
        rule: Sampling rule of the run.

    Raises:
        MethodFault: a method uses heads, or models other than a draft model. Their memory cannot be
            predicted.
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
            raise MethodFault(
                f"the memory of {type(method).name} cannot be predicted: only methods with a draft"
                " model or a lookup are supported"
            )
        for n in {1, *map(len, groups)}:  # the warm-up uses a single sequence
            max_sequences = method.max_sequences(batch)
            for session in Batch(
                workspace, requests[:n], Sampling(), size=batch, slots=max_sequences
            ).join():
                type(method)(method.params).start(session)
    target = sizes["target"]
    most = max(nodes for _, nodes in methods)
    step = batch * (most + 1)
    # One forward may prefill several adjacent prompts. This happens at the start of a batch, and
    # when several sequences end in the same step.
    slots = max(method.max_sequences(batch) for method, _ in methods)
    joining = max(
        (group[first : first + slots] for group in groups for first in range(len(group))), key=sum
    )
    # The engine keeps the buffers of short forwards. These are prefills of short prompts, and the
    # verification forwards of one or two steps.
    short = sorted({n for group in groups for n in group if n <= MAX_FEW})[-MAX_SCRATCH:]
    buffers = (sum(short) + 2 * step) * target.scratch
    distributions = noise = 0
    if rule in ("rejection", "block"):
        distributions = 4 * target.vocab * (2 * (most + 1) + batch * most)
    elif rule == "coupled":
        rows = max(1, min(NOISE_BLOCK, NOISE_NUMBERS // target.vocab))
        block = rows * target.vocab
        noise = block * 4 * min(2, -(-budget // rows)) * batch  # each sequence keeps two blocks
        distributions = block * 8 * NOISE_PARTS
    long = sum(joining) if max(joining) > MAX_FEW else 0
    prefill = (
        sum(joining) * target.temporaries + long * target.scratch,
        len(joining) * target.logits,
    )
    # Count the logits twice, because a step's logits are freed only after the next step has
    # computed its logits.
    prefilled = min(chunk, longest) if max(map(len, groups)) > slots else 0
    verify = (step + prefilled) * target.temporaries, 2 * step * target.logits
    decide = 0, verify[1] + distributions
    activations, candidates = max(prefill, verify, decide, key=sum)
    return Footprint(
        weights=target.weights,
        draft=sizes["draft"].weights if "draft" in sizes else 0,
        rows=workspace.state_bytes,
        activations=activations + buffers,
        candidates=candidates + noise,
    )


def expected_tokens(chance: float, nodes: int, *, tree: bool) -> float:
    """Return the expected number of tokens that a step generates.

    The target always adds one token. A draft token (a node) adds the probability that the node and
    all its ancestors are accepted. The best child of a node is accepted with probability `chance`.
    If this child is rejected, the next child is accepted with the same probability, and so on.

    Args:
        chance: Acceptance rate of a draft token.
        nodes: Number of draft tokens.
        tree: True for the tree with the highest expected value, False for a chain.
    """
    total, open_ = 1.0, [(-chance, chance)]
    for _ in range(nodes):
        _, product = heapq.heappop(open_)
        total += product
        heapq.heappush(open_, (-product * chance, product * chance))
        if tree:
            heapq.heappush(open_, (-product * (1 - chance), product * (1 - chance)))
    return total

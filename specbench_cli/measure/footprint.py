"""Bytes that a batch holds at its peak, worked out before any weight is read.

The memory model of SpecMemo (Yildirim, Chen, 2025, arXiv:2506.01986), for this engine: weights of
target and draft, rows of keys and values that are preallocated for every seat, and at the peak what
a forward has in hand: activations of its rows, and the candidates' logits and laws. Rows are
counted exactly, by having the methods take their states from decoders that compute nothing.
"""

from __future__ import annotations

import heapq
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Self

import torch

from specbench_cli.engine.batch import Batch
from specbench_cli.engine.method import Method
from specbench_cli.engine.models.attention import FEW
from specbench_cli.engine.models.checkpoint import config_facts, read_config, text_config
from specbench_cli.engine.models.fused import fits
from specbench_cli.engine.models.layers import HEAD_COPY_UP_TO
from specbench_cli.engine.models.linear import form_for
from specbench_cli.engine.models.plan import MAX_SCRATCH
from specbench_cli.engine.simulation import Script, Scripted
from specbench_cli.engine.types import Rule
from specbench_cli.engine.verify.sampling import Sampling
from specbench_cli.engine.workspace import Workspace
from specbench_cli.errors import MethodFault

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
    and values; activations: of the largest forward; candidates: logits, laws, noise of drafts."""

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
        name: Scripted(name, scripts, sure=True, row_bytes=each.row) for name, each in sizes.items()
    }
    longest = max(map(max, groups))
    workspace = Workspace(decoders, longest + budget, costs=lambda model, rows, *step: 1.0)
    requests = [script.request(place) for place, script in enumerate(scripts)]
    for method, _ in methods:
        if method.artifacts() or method.models() or not method.batches:
            raise MethodFault(f"what {type(method).name} holds beside a draft model is not known")
        for n in {1, *map(len, groups)}:  # a row is warmed up alone
            held = method.held(batch)
            for session in Batch(workspace, requests[:n], Sampling(), size=batch, held=held).join():
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
    laws = noise = 0
    if rule in ("rejection", "block"):
        laws = 4 * target.vocab * (2 * (most + 1) + batch * most)
    elif rule == "coupled":
        rows = max(1, min(NOISE_BLOCK, NOISE_NUMBERS // target.vocab))
        block = rows * target.vocab
        noise = block * 4 * min(2, -(-budget // rows)) * batch  # of each one's last two blocks
        laws = block * 8 * NOISE_PARTS
    long = sum(joining) if max(joining) > FEW else 0
    prefill = sum(joining) * target.moving + long * target.scratch, len(joining) * target.logits
    # A step's logits are held until the next one's are there.
    beside = min(chunk, longest) if max(map(len, groups)) > seats else 0
    verify = (step + beside) * target.moving, 2 * step * target.logits
    decide = 0, verify[1] + laws
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

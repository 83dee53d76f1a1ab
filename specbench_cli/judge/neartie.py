"""Near-ties: where they may arise, and which of them are rounding for certain.

Where: at every position of vanilla's own output a rival that is within reach of the chosen token
may be chosen by a program that rounds otherwise; `stats.neartie` says with what chance at most, and
how many near-ties are too many.

For certain: a method scores several tokens in one forward, vanilla one, and kernels round by shape.
Vanilla's own decoder, made to read the method's output in blocks of the widths that the method
verified with, and in trees of its trees' shapes, rounds as the method did: where it then chooses
that very output, width alone explains the near-tie.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from functools import partial
from typing import Any

import torch
from torch import Tensor

from specbench_cli.engine.models.decoder import Decoder
from specbench_cli.engine.request import Request
from specbench_cli.engine.types import Tokens
from specbench_cli.engine.verify.sampling import Noise, Sampling, log_warp
from specbench_cli.engine.verify.tree import build_tree_mask
from specbench_cli.store.schema import Drafted, Steps

REACH = 2.0
"""How far errors of gaps may reach, in tolerances: see `stats.neartie`."""


def flip_chances(
    decision: Tensor, chosen: Tensor, reach: float, kept: tuple[Tensor, Tensor] | None = None
) -> Tensor:
    """At each position the most that the chance of another choice can be, [n] in 0..1.

    Args:
        decision: [n, V] decision scores, before any cut.
        chosen: [n, 1] the tokens chosen.
        reach: of errors, in units of decision scores.
        kept: [n, V] bool each: tokens that are certainly inside the cuts, and certainly outside;
            of the others rounding decides. None where there is no cut.
    """
    if reach == 0.0:
        return torch.zeros_like(decision[:, 0])
    gap = decision.gather(-1, chosen) - decision
    overtakes = ((1 - gap / reach) / 2).clamp(0, 1).scatter(-1, chosen, 0.0)
    if kept is not None:
        inside, outside = kept
        # What rounding alone keeps is in as often as out; if the chosen token is out, any other is
        # chosen.
        overtakes = torch.where(inside, overtakes, overtakes.clamp_max(0.5))
        overtakes = overtakes.masked_fill(outside, 0.0)
        overtakes = overtakes.scatter(-1, chosen, 0.5 * (~inside.gather(-1, chosen)))
    return overtakes.sum(-1).clamp_max(1.0)


@torch.inference_mode()
def width_explains(
    decoder: Decoder,
    sampling: Sampling,
    request: Request,
    ids: list[int],
    steps: Steps,
    drafts: Sequence[Drafted] | None = None,
) -> bool:
    """Whether vanilla's decoder chooses exactly `ids` when it reads them as wide as the method did.

    Each step's block holds the last committed token and the step's draft. Without the drafts, and
    for a recurrent state, the output's own tokens stand in for them: what follows a token cannot
    change its row but through the shape.

    Args:
        decoder: the target as vanilla runs it.
        request: what was decoded.
        ids: the method's output.
        steps: its steps.
        drafts: what was proposed in each.
    """
    read = partial(_by_width, decoder, ids=ids, steps=steps, drafts=drafts)
    scores = read(request)
    if (contrast := sampling.contrast) is not None:
        weak = replace(request, ids=contrast.weaken(request.ids))
        scores = contrast.apply(scores, read(weak))
    if sampling.processor is not None:
        scores = sampling.processor.process_output(scores, ids)
    if sampling.rule != "greedy":
        noise = Noise(
            sampling.seed, request.prompt_id, request.turn, scores.shape[-1], scores.device
        )
        scores = log_warp(scores, sampling) + noise.rows(0, scores.shape[0])
    choices: list[int] = scores.argmax(-1).tolist()
    return choices == ids


def _by_width(
    decoder: Decoder,
    request: Request,
    ids: list[int],
    steps: Steps,
    drafts: Sequence[Drafted] | None,
) -> Tensor:
    """Logits [n, V] that each of an output's n tokens was chosen from, read in steps' blocks."""
    n_prompt = len(request.ids)
    widths = [
        max(nodes + 1, kept) for nodes, kept in zip(steps.nodes, steps.committed, strict=True)
    ]
    padding = [ids[-1]] * max(widths, default=0)
    text = torch.tensor([[*request.ids, *ids, *padding]], device=decoder.device)
    state = request.state(decoder, text.shape[1])
    first = decoder.forward(Tokens(text[:, :n_prompt]), state).logits
    assert first is not None
    rows, end = [first[0]], n_prompt
    state.commit(0, range(n_prompt))
    for at, (width, kept) in enumerate(zip(widths, steps.committed, strict=True)):
        block, path = text[:, end : min(end + width, decoder.max_positions)], list(range(kept))
        shape: dict[str, Any] = {}
        if drafts is not None and state.by_row:
            draft = drafts[at]
            proposed = torch.tensor([draft.tokens], dtype=text.dtype, device=decoder.device)
            block = torch.cat((text[:, end : end + 1], proposed), 1)
            path = [0, *(node + 1 for node in draft.path)][:kept]
            if draft.parents is not None:
                mask, depths = build_tree_mask(tuple(draft.parents), decoder.device)
                shape = {"positions": (depths + end)[None], "mask": mask}
        missing = text[:, state.length() : end]  # a recurrent state's, see `Scoring`
        blocks = [block] if state.by_row else [torch.cat((missing, block[:, :1]), 1), block[:, 1:]]
        found = [
            decoder.forward(Tokens(each), state, logits_at="all", **shape).logits
            for each in blocks
            if each.shape[1]
        ]
        logits = torch.cat([each for each in found if each is not None], 1)[0]
        path = [*range(missing.shape[1]), *(missing.shape[1] + row for row in path)]
        rows.append(logits[path[missing.shape[1] :]])
        state.commit(0, path)
        end += kept
    return torch.cat(rows)

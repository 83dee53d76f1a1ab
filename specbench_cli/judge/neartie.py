"""Near-ties: outputs that differ from vanilla's because two tokens have almost equal scores.

Vanilla is plain decoding without a draft. Another correct program rounds differently, so it may
choose another token with almost the same score. This module answers two questions about near-ties.

How probable is a near-tie at each position of vanilla's output? `flip_chances` computes an upper
bound of this probability. `stats.neartie` uses it to bound the number of near-ties in a run.

Does the width of the forwards explain a near-tie? Width is the number of tokens in a forward. A
method verifies several tokens in one forward, vanilla computes one token per forward, and rounding
depends on the width. `width_explains` lets the target read the method's output in blocks with the
widths and tree shapes of the method's forwards. If the target then chooses exactly this output, the
width explains the near-tie.
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
from specbench_cli.store.schema import DraftedTokens, Steps

MAX_GAP_ERROR = 2.0
"""Largest error of the difference of two scores, in multiples of the tolerance."""


def flip_chances(
    decision: Tensor, chosen: Tensor, max_error: float, cuts: tuple[Tensor, Tensor] | None = None
) -> Tensor:
    """Return an upper bound of the probability that rounding changes the token at each position.

    Args:
        decision: [n, vocab] scores before top-k and top-p. At each position, the token with the
            largest score is chosen.
        chosen: [n, 1] the chosen tokens.
        max_error: Largest rounding error of the difference of two scores.
        cuts: Two bool tensors [n, vocab]. The first marks tokens that top-k and top-p surely keep.
            The second marks tokens that they surely remove. For all other tokens, rounding decides.
            None without top-k and top-p.

    Returns:
        [n] probabilities.
    """
    if max_error == 0.0:
        return torch.zeros_like(decision[:, 0])
    gap = decision.gather(-1, chosen) - decision
    overtakes = ((1 - gap / max_error) / 2).clamp(0, 1).scatter(-1, chosen, 0.0)
    if cuts is not None:
        inside, outside = cuts
        # A token at the limit of top-k or top-p is assumed to be kept with probability 0.5. If the
        # chosen token is removed, another token is chosen.
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
    drafts: Sequence[DraftedTokens] | None = None,
) -> bool:
    """Return True if the target chooses exactly `ids` in forwards as wide as the method's forwards.

    Each step of the method becomes one block of tokens: the last committed token and the draft. If
    the drafts are unknown, or if the target has a recurrent state, the next tokens of the output
    replace the draft. This is valid because later tokens affect the logits of earlier tokens only
    through the shape of the forward.

    Args:
        decoder: The target as vanilla runs it.
        sampling: Sampling settings of the run.
        request: The request that the method decoded.
        ids: Output of the method.
        steps: Steps of the method.
        drafts: Draft of each step. None if they are unknown.
    """
    read = partial(_logits_by_width, decoder, ids=ids, steps=steps, drafts=drafts)
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


def _logits_by_width(
    decoder: Decoder,
    request: Request,
    ids: list[int],
    steps: Steps,
    drafts: Sequence[DraftedTokens] | None,
) -> Tensor:
    """Return the logits [n, vocab] at which the n output tokens are chosen.

    Each step is one forward.
    """
    n_prompt = len(request.ids)
    widths = [
        max(nodes + 1, committed)
        for nodes, committed in zip(steps.nodes, steps.committed, strict=True)
    ]
    padding = [ids[-1]] * max(widths, default=0)
    text = torch.tensor([[*request.ids, *ids, *padding]], device=decoder.device)
    state = request.state(decoder, text.shape[1])
    first = decoder.forward(Tokens(text[:, :n_prompt]), state).logits
    assert first is not None
    rows, end = [first[0]], n_prompt
    state.commit(0, range(n_prompt))
    for at, (width, committed) in enumerate(zip(widths, steps.committed, strict=True)):
        block, path = text[:, end : min(end + width, decoder.max_positions)], list(range(committed))
        shape: dict[str, Any] = {}
        if drafts is not None and state.by_row:
            draft = drafts[at]
            proposed = torch.tensor([draft.tokens], dtype=text.dtype, device=decoder.device)
            block = torch.cat((text[:, end : end + 1], proposed), 1)
            path = [0, *(node + 1 for node in draft.path)][:committed]
            if draft.parents is not None:
                mask, depths = build_tree_mask(tuple(draft.parents), decoder.device)
                shape = {"positions": (depths + end)[None], "mask": mask}
        # Tokens that the state has not processed yet. Only a recurrent state can have such tokens.
        missing = text[:, state.length() : end]
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
        end += committed
    return torch.cat(rows)

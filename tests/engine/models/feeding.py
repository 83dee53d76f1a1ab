"""Helpers that feed tokens to a decoder in different ways, and the expected logits."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from specbench_cli.engine.models.decoder import Decoder
from specbench_cli.engine.models.load import get_module
from specbench_cli.engine.types import Tokens

CLOSE = 1e-5

PARENTS = (0, 0, 0, 1, 1, 2, 4)
"""A tree of six nodes under the last committed token, which is row 0 and has no entry of its
own."""


def some_ids(n: int, b: int = 1) -> Tensor:
    return torch.randint(2, 197, (b, n), generator=torch.Generator().manual_seed(n))


def own_logits(decoder: Any, ids: Tensor) -> Tensor:
    """Return the logits of transformers' module."""
    with torch.no_grad():
        return get_module(decoder)(input_ids=ids).logits


def logits(decoder: Decoder, ids: Tensor, state: Any, **how: Any) -> Tensor:
    """Return the logits of all rows of one forward."""
    found = decoder.forward(Tokens(ids), state, logits_at="all", **how).logits
    assert found is not None
    return found


def relative_difference(a: Tensor, b: Tensor) -> float:
    """Return the largest difference, as a share of the largest number above 1."""
    return float((a - b).abs().max() / b.abs().max().clamp_min(1.0))


def logits_with_rejections(decoder: Decoder, ids: Tensor, cuts: Sequence[int]) -> Tensor:
    """Return the logits of a text that is read in blocks, with drafts that are rejected in part.

    Args:
        cuts: where the prompt's first and second block end, and where the single tokens end.
    """
    first, second, n = cuts
    state = decoder.new_state(ids.shape[1] + 4)
    found = [logits(decoder, ids[:, :first], state), logits(decoder, ids[:, first:second], state)]
    found += [logits(decoder, ids[:, at : at + 1], state) for at in range(second, n)]
    state.commit(0, range(n))
    # Verify six draft tokens, reject the last four, and feed the right ones.
    wrong = torch.cat((ids[:, n : n + 2], 196 - ids[:, n + 2 : n + 6]), 1)
    found.append(logits(decoder, wrong, state)[:, :2])
    state.commit(0, (0, 1))
    found.append(logits(decoder, ids[:, n + 2 : n + 8], state)[:, :2])
    state.rollback(0, n + 4)
    found.append(logits(decoder, ids[:, n + 4 :], state))
    return torch.cat(found, 1)


def check_two_sequences(decoder: Decoder, n: int) -> None:
    """Assert that each of two sequences in one forward of n tokens has the logits it has alone."""
    prompts, block = [some_ids(21), some_ids(9)], some_ids(n, 2)
    together = decoder.new_state(40, n_seqs=3)
    for seq, prompt in zip((2, 0), prompts, strict=True):
        logits(decoder, prompt, together, seqs=(seq,))
    found = logits(decoder, block, together, seqs=(2, 0))
    assert [together.length(seq) for seq in range(3)] == [9 + n, 0, 21 + n]
    for i, prompt in enumerate(prompts):
        alone = decoder.new_state(40)
        logits(decoder, prompt, alone)
        assert relative_difference(found[i], logits(decoder, block[i : i + 1], alone)[0]) <= CLOSE


def ancestors(node: int) -> list[int]:
    return [0] if node == 0 else [*ancestors(PARENTS[node]), node]


def tree_mask() -> Tensor:
    mask = torch.zeros(len(PARENTS), len(PARENTS), dtype=torch.bool)
    for node in range(len(PARENTS)):
        mask[node, ancestors(node)] = True
    return mask


def tree_positions(start: int) -> Tensor:
    return torch.tensor([[start + len(ancestors(node)) - 1 for node in range(len(PARENTS))]])


def check_tree_rows(decoder: Decoder) -> None:
    """Assert that a tree's row has the logits of the plain sequence from the root to its node."""
    prompt, nodes, state = some_ids(17), some_ids(7), decoder.new_state(40)
    logits(decoder, prompt, state)
    found = logits(decoder, nodes, state, mask=tree_mask(), positions=tree_positions(17))
    for node in range(len(PARENTS)):
        text = torch.cat((prompt, nodes[:, ancestors(node)]), 1)
        assert relative_difference(found[0, node], own_logits(decoder, text)[0, -1]) <= CLOSE

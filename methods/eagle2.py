"""EAGLE-2: dynamic draft trees.

Yuhui Li, Fangyun Wei, Chao Zhang, Hongyang Zhang: EAGLE-2: Faster Inference of Language Models with
Dynamic Draft Trees, EMNLP 2024, arXiv:2406.16858.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, ClassVar

from methods._heads.claims import reported
from methods._heads.eagle import EagleHead
from methods._heads.layer import LayerHead
from methods._heads.method import GrowingTree
from specbench_cli.api import Claim


class Eagle2(GrowingTree):
    """EAGLE-2: EAGLE's head, whose tree grows where the head is sure of itself.

    Exact because the tree is a function of the past, and in coupled decoding of the noise that the
    target shares: children are the head's likeliest tokens, each of which stands with the target's
    own probability of it, and in greedy and coupled decoding iff it is the target's own choice.
    Differs from the authors' code: the first level, which the root's forward gives, counts in
    `depth` (5 here is 4 there); nothing is drafted past the budget; in coupled decoding the head's
    scores carry the target's noise.

    One step:
    1. Feed the head the committed tokens that it has not read, each beside the target's true
       feature of the token before; what it drafted of them before is forgotten.
    2. Feed the best `width` nodes of each level, by the probability of their paths, each beside the
       feature that the head predicted for its parent; every one gets `width` children.
    3. Keep the best `nodes` of all children as the tree.
    4. (engine) One target forward over the last committed token and the tree; verify; commit.
    """

    name: ClassVar[str] = "eagle2"
    head: ClassVar[type[LayerHead]] = EagleHead
    paper: ClassVar[Mapping[str, Any]] = {"nodes": 59, "depth": 6, "width": 10}
    claims: ClassVar[tuple[Claim, ...]] = reported(
        ("Vicuna 7B", "3.62x"),
        ("Vicuna 13B", "4.26x"),
        ("LLaMA3-Instruct 8B", "3.46x"),
    )
    citation: ClassVar[str] = """
        @inproceedings{li2024eagle2,
          title = {{EAGLE-2}: Faster Inference of Language Models with Dynamic Draft Trees},
          author = {Li, Yuhui and Wei, Fangyun and Zhang, Chao and Zhang, Hongyang},
          booktitle = {EMNLP},
          year = {2024},
          eprint = {2406.16858},
          archiveprefix = {arXiv},
        }
    """

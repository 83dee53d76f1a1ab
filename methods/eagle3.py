"""EAGLE-3: a head over features of three layers, trained on its own drafts.

Yuhui Li, Fangyun Wei, Chao Zhang, Hongyang Zhang: EAGLE-3: Scaling up Inference Acceleration of
Large Language Models via Training-Time Test, NeurIPS 2025, arXiv:2503.01840.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, ClassVar

from methods._heads.claims import reported
from methods._heads.eagle3 import Eagle3Head
from methods._heads.layer import LayerHead
from methods._heads.method import GrowingTree
from specbench_cli.api import Claim


class Eagle3(GrowingTree):
    """EAGLE-3: a head over three of the target's layers, trained on its own drafts, grows the tree.

    Exact because the tree is a function of the past, and in coupled decoding of the noise that the
    target shares: children are the head's likeliest tokens, each of which stands with the target's
    own probability of it, and in greedy and coupled decoding iff it is the target's own choice.
    A token that the head cannot say is never drafted.
    Differs from the authors' code: the first level, which the root's forward gives, counts in
    `depth` (5 here is 4 there); nothing is drafted past the budget; in coupled decoding the head's
    scores carry the target's noise.

    One step:
    1. Feed the head the committed tokens that it has not read, each beside the target's rows of the
       token before at three layers; what it drafted of them before is forgotten.
    2. Feed the best `width` nodes of each level, by the probability of their paths, each beside the
       row that left the head at its parent; every one gets `width` children.
    3. Keep the best `nodes` of all children as the tree.
    4. (engine) One target forward over the last committed token and the tree; verify; commit.
    """

    name: ClassVar[str] = "eagle3"
    head: ClassVar[type[LayerHead]] = Eagle3Head
    paper: ClassVar[Mapping[str, Any]] = {"nodes": 59, "depth": 8, "width": 10}
    claims: ClassVar[tuple[Claim, ...]] = reported(
        ("Vicuna 13B", "5.6x"),
        ("LLaMA-3.1-Instruct 8B", "4.4x"),
        ("LLaMA-3.3-Instruct 70B", "4.1x"),
    )
    citation: ClassVar[str] = """
        @inproceedings{li2025eagle3,
          title = {{EAGLE-3}: Scaling up Inference Acceleration of Large Language Models via
            Training-Time Test},
          author = {Li, Yuhui and Wei, Fangyun and Zhang, Chao and Zhang, Hongyang},
          booktitle = {NeurIPS},
          year = {2025},
          eprint = {2503.01840},
          archiveprefix = {arXiv},
        }
    """

"""Accept rules that are not exact: which draft tokens stand though the lossless rule rejects them.

The lossless rule of the decoding mode (`chain`, `siblings`) is asked first, and what it takes is
"accepted". A token that it rejects and an accept rule lets pass is "relaxed", and decoding goes on
behind it; the first one that neither lets pass is replaced by the lossless rule's token. Without an
accept rule, or with one at its off position, nothing changes: not a token, not a draw.

An accept rule is a pure function of the target's distributions and the draft's tokens. Under
rejection and coupled sampling these are the warped ones; under greedy decoding, which has no
temperature, softmax of the logits.

Whether a rule knows anything is told by its control: `RandomAccept`, which lets as many pass and
does not look at them.
"""

from __future__ import annotations

import math
from abc import ABC, abstractmethod
from collections.abc import Sequence
from dataclasses import dataclass, fields
from typing import ClassVar, Literal

import torch
from pydantic import Field, SerializerFunctionWrapHandler, model_serializer
from torch import Tensor

from specbench_cli.engine import host
from specbench_cli.engine.params import MethodParams
from specbench_cli.engine.types import Guarantee
from specbench_cli.engine.verify.random import Random
from specbench_cli.engine.verify.tree import ROOT, Tree
from specbench_cli.errors import MethodFault

# ---- the rules ----------------------------------------------------------------------------------


@dataclass(frozen=True)
class AcceptRule(ABC):
    """Base of accept rules: a frozen dataclass of its numbers, and one function.

    Class attributes:
        name: in tables and records.
        guarantee: what is left of the output's promise.
    """

    name: ClassVar[str]
    guarantee: ClassVar[Guarantee] = "quality_only"

    @abstractmethod
    def lets_pass(self, p: Tensor, tokens: Tensor) -> Tensor:
        """Which draft tokens stand though the lossless rule rejects them.

        Args:
            p: [m, V], the target's distribution in each token's place, at its parent.
            tokens: [m] int64.
        Returns:
            [m] bool.
        """

    @property
    def chance(self) -> float:
        """The chance that a token which may pass does; tossed once for the children of a node."""
        return 1.0

    @property
    def off(self) -> bool:
        """Whether no token can pass: the method is then exact."""
        return False

    def control(self, rate: float) -> RandomAccept:
        """The rule that lets as many pass, whatever they are.

        Args:
            rate: of the levels that the lossless rule rejected, the share that this rule let pass,
                as measured (`rule rate` in reports).
        """
        return RandomAccept(rate)

    def __str__(self) -> str:
        numbers = ", ".join(f"{f.name}={getattr(self, f.name):g}" for f in fields(self))
        return f"{self.name}({numbers})"


@dataclass(frozen=True)
class Threshold(AcceptRule):
    """Lets pass what the target gives at least a probability of epsilon.

    Every committed token then has that probability at least, or is the lossless rule's.
    """

    epsilon: float
    name: ClassVar[str] = "threshold"

    def lets_pass(self, p: Tensor, tokens: Tensor) -> Tensor:
        """p(x) >= epsilon."""
        return _of(p, tokens) >= self.epsilon

    @property
    def off(self) -> bool:
        """Above 1."""
        return self.epsilon > 1


@dataclass(frozen=True)
class Typical(AcceptRule):
    """Typical acceptance: the less sure the target is, the less a token needs.

    Tianle Cai et al.: Medusa: Simple LLM Inference Acceleration Framework with Multiple Decoding
    Heads, ICML 2024, arXiv:2401.10774, section 2.3.1. There it judges all draft tokens, and the
    first one is taken in any case; here it is asked of those that the lossless rule rejects.
    """

    epsilon: float
    delta: float
    name: ClassVar[str] = "typical"

    def lets_pass(self, p: Tensor, tokens: Tensor) -> Tensor:
        """p(x) > min(epsilon, delta exp(-H(p)))."""
        entropy: Tensor = torch.special.entr(p).sum(-1)
        return _of(p, tokens) > (self.delta * (-entropy).exp()).clamp_max(self.epsilon)

    @property
    def off(self) -> bool:
        """Where not even what is sure can pass."""
        return self.epsilon >= 1 and self.delta == math.inf


@dataclass(frozen=True)
class RandomAccept(AcceptRule):
    """The control of every accept rule: lets a token pass at a fixed rate, whatever it is.

    Of a tree a toss decides for the children of a node together, so that as many levels pass,
    however many children there are.
    """

    rate: float
    name: ClassVar[str] = "random"

    def lets_pass(self, p: Tensor, tokens: Tensor) -> Tensor:
        """All of them."""
        return torch.ones_like(tokens, dtype=torch.bool)

    @property
    def chance(self) -> float:
        """The rate."""
        return self.rate

    @property
    def off(self) -> bool:
        """At rate 0."""
        return self.rate <= 0


def _of(p: Tensor, tokens: Tensor) -> Tensor:
    return p.gather(-1, tokens[:, None])[:, 0]


# ---- what verification asks ---------------------------------------------------------------------


def passing(
    rule: AcceptRule | None, p: Tensor, tokens: Tensor, tree: Tree | None, random: Random
) -> Tensor | None:
    """Which draft tokens may stand though the lossless rule rejects them; no wait for the device.

    Args:
        p: [m, V] or more rows, the target's distributions at the root and the nodes.
        tokens: [m] int64.
        tree: the draft's shape; None for a chain.
    Returns:
        [m] bool; None where no rule has a say.
    Raises:
        MethodFault: the rule's answer is not one bool a token.
    """
    m = tokens.shape[0]
    if rule is None or not m:
        return None
    parents: Sequence[int] = range(ROOT, m - 1) if tree is None else tree.parents
    rows = p[:m] if tree is None else p[host.ids([at + 1 for at in parents], p.device)]
    passes = rule.lets_pass(rows, tokens)
    if passes.shape != tokens.shape or passes.dtype != torch.bool:
        raise MethodFault(
            f"accept rule {rule.name!r}: {list(passes.shape)} of {passes.dtype} for {m} tokens",
            "`lets_pass` returns [m] of bool",
        )
    return passes & _tosses(rule.chance, parents, p, random) if rule.chance < 1 else passes


def _tosses(chance: float, parents: Sequence[int], p: Tensor, random: Random) -> Tensor:
    """For each node what came of its parent's toss, [m] bool."""
    places = {parent: place for place, parent in enumerate(dict.fromkeys(parents))}
    law = host.sent(torch.tensor((1 - chance, chance), dtype=p.dtype), p.device)
    own = host.ids([places[parent] for parent in parents], p.device)
    return random.categorical(law.expand(len(places), 2))[own].bool()


# ---- parameters ---------------------------------------------------------------------------------


class AcceptParams(MethodParams):
    """Parameters of a method that takes an accept rule: the first of the bases of its own."""

    accept: Literal["exact", "threshold", "typical", "random"] = Field(
        "exact",
        description="what stands: what the lossless rule takes (exact), and beside it what the"
        " target finds likely enough (threshold, typical) or any token at a rate (random: their"
        " control)",
    )
    epsilon: float = Field(
        0.09,
        ge=0,
        description="threshold, typical: least probability of what passes; threshold above 1: none",
    )
    delta: float = Field(
        0.3, ge=0, description="typical: least probability, as a part of exp(-entropy)"
    )
    rate: float = Field(
        0.1, ge=0, le=1, description="random: share of the rejected levels that pass"
    )

    @property
    def rule(self) -> AcceptRule | None:
        """The rule that these stand for."""
        match self.accept:
            case "threshold":
                return Threshold(self.epsilon)
            case "typical":
                return Typical(self.epsilon, self.delta)
            case "random":
                return RandomAccept(self.rate)
        return None

    @model_serializer(mode="wrap")
    def _as_asked(self, written: SerializerFunctionWrapHandler) -> dict[str, object]:
        """Without the parameters of rules that are not asked."""
        rule = self.rule
        asked = set() if rule is None else {"accept", *(f.name for f in fields(rule))}
        unasked = {*AcceptParams.model_fields} - asked
        return {name: value for name, value in written(self).items() if name not in unasked}

"""Lenience: speculative sampling that takes a token as if the target made it more likely.

Yaniv Leviathan, Matan Kalman, Yossi Matias: Fast Inference from Transformers via Speculative
Decoding, ICML 2023, arXiv:2211.17192, appendix A.5.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, ClassVar

from specbench_cli.api import (
    AcceptRule,
    DraftModelMethod,
    Field,
    Lenient,
    MethodParams,
)


class LenientParams(MethodParams):
    """Parameters of `Lenience`."""

    length: int = Field(5, ge=1, description="draft tokens a step")
    factor: float = Field(
        0.5, ge=0, le=1, description="lenience: q times this is compared with p; off: 1"
    )  # fmt: skip


class Lenience(DraftModelMethod):
    """Lenient: accepts draft tokens as if the target's p were larger by a factor.

    Not exact: x drawn from q stands with probability min(1, p(x) / (factor q(x))); no token is then
    made more than 1 / factor times as likely as p has it, as long as it was drafted. At its off
    position, factor 1, it makes the tokens of `sps`.
    Differs from the paper: nothing under rejection. In greedy decoding the paper's way is a
    comparison with the best token, p(x) >= factor max p; in coupled decoding the same is asked of
    what decides there, log p + noise.

    One step:
    1. (base) Feed the draft its pending tokens, and draw `length` tokens x from it.
    2. (engine) One target forward over the last committed token and the draft. x stands with
       probability min(1, p(x) / (factor q(x))); greedy: if p(x) >= factor max p.
    3. (engine) In place of the first that does not stand: a draw from norm(max(p - q, 0)); greedy:
       the target's best.
    4. (base) Forget the draft's rows of rejected tokens.
    """

    name: ClassVar[str] = "lenient"
    aliases: ClassVar[tuple[str, ...]] = ("lenience",)
    family: ClassVar[str] = "a draft model"
    proposed_in: ClassVar[tuple[str, ...]] = ("leviathan2023fast",)
    lossy: ClassVar[bool] = True
    Params: ClassVar[type[LenientParams]] = LenientParams
    params: LenientParams
    needs: ClassVar[frozenset[str]] = frozenset({"draft"})
    tunable: ClassVar[frozenset[str] | None] = frozenset({"length"})
    relative: ClassVar[str | None] = "sps"
    off: ClassVar[Mapping[str, Any]] = {"factor": 1.0}

    @property
    def accept(self) -> AcceptRule:
        """Step 2, of what the lossless rule rejects."""
        return Lenient(self.params.factor)

"""The control of every rule over tokens: as many rejected tokens pass, whatever they are."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, ClassVar

from specbench_cli.api import (
    AcceptRule,
    DraftModelMethod,
    Field,
    MethodParams,
    RandomAccept,
)


class RandomAcceptParams(MethodParams):
    """Parameters of `RandomAcceptance`."""

    length: int = Field(5, ge=1, description="draft tokens a step")
    rate: float = Field(
        0.1, ge=0, le=1, description="share of the rejected tokens that pass; off: 0"
    )  # fmt: skip
    like: str | None = Field(
        None, description="the row whose rate, as measured, takes the place of `rate`"
    )  # fmt: skip


class RandomAcceptance(DraftModelMethod):
    """Random accept: accepts rejected draft tokens at random, as a control for lossy rules.

    Not exact, and no way to decode: a rule that keeps no more of the answers' quality than this
    does, at the same rate, knows nothing of what may pass. At its off position, rate 0, it makes
    the tokens of `sps`.

    One step:
    1. (base) Feed the draft its pending tokens, and draw `length` tokens from it.
    2. (engine) One target forward over the last committed token and the draft. A token stands if
       the lossless rule takes it, or else with probability `rate`, whatever it is.
    3. (engine) In place of the first that does not stand: the lossless rule's token.
    4. (base) Forget the draft's rows of rejected tokens.
    """

    name: ClassVar[str] = "random-accept"
    family: ClassVar[str] = "a draft model"
    lossy: ClassVar[bool] = True
    Params: ClassVar[type[RandomAcceptParams]] = RandomAcceptParams
    params: RandomAcceptParams
    needs: ClassVar[frozenset[str]] = frozenset({"draft"})
    tunable: ClassVar[frozenset[str] | None] = frozenset({"length"})
    relative: ClassVar[str | None] = "sps"
    off: ClassVar[Mapping[str, Any]] = {"rate": 0.0}
    control: ClassVar[bool] = True

    @property
    def accept(self) -> AcceptRule:
        """Step 2, of what the lossless rule rejects."""
        return RandomAccept(self.params.rate)

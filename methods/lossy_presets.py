"""Lossy variants of standard speculative sampling (`sps`). Each variant has one accept rule.

The same rules are also available as parameters of `sps` and of methods with draft heads, such as
`accept=typical`. A variant has two kinds of parameters: the draft length, and the parameters of its
rule.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, ClassVar, Literal

from specbench_cli.api import AcceptParams, AcceptRule, DraftModelMethod, Field, MethodParams


class PresetParams(MethodParams):
    """Common parameters of the lossy variants."""

    length: int = Field(5, ge=1, description="number of draft tokens per step")


class _Preset(DraftModelMethod):
    """Speculative sampling with one accept rule.

    One step:
    1. (base) The draft model processes its pending tokens. Draw `length` tokens from it.
    2. (engine) One target forward over the last committed token and the draft. A draft token is
       accepted if the lossless rule or the accept rule accepts it.
    3. (engine) Replace the first rejected token by the lossless rule's token.
    4. (base) Drop the draft model's KV entries of rejected tokens.

    Class attributes: sets: value of `sps.accept`.
    """

    family: ClassVar[str] = "a draft model"
    lossy: ClassVar[bool] = True
    needs: ClassVar[frozenset[str]] = frozenset({"draft"})
    tunable: ClassVar[frozenset[str] | None] = frozenset({"length"})
    lossless_counterpart: ClassVar[str | None] = "sps"
    sets: ClassVar[Literal["typical", "lenient", "random"]]

    @property
    def accept(self) -> AcceptRule | None:
        """Accept rule of this variant, with its parameters."""
        numbers = self.params.model_dump(exclude={"length"})
        return AcceptParams(accept=self.sets, **numbers).rule


class TypicalParams(PresetParams):
    """Parameters of `TypicalAcceptance`."""

    epsilon: float = Field(
        0.09,
        ge=0,
        description="a token with at least this probability is accepted (epsilon in the paper:"
        " 0.09); 1 with delta 1e9 makes the method lossless",
    )
    delta: float = Field(
        0.3,
        ge=0,
        description="a token is also accepted above delta * exp(-entropy), so that an uncertain"
        " target accepts less likely tokens (delta in the paper: 0.3)",
    )


class TypicalAcceptance(_Preset):
    """Typical: accepts draft tokens above a probability threshold that depends on the entropy.

    Tianle Cai, Yuhong Li, Zhengyang Geng, Hongwu Peng, Jason D. Lee, Deming Chen, Tri Dao: Medusa:
    Simple LLM Inference Acceleration Framework with Multiple Decoding Heads, ICML 2024,
    arXiv:2401.10774, section 2.3.1.

    Not exact: a token that the lossless rule rejects is accepted if p(x) > min(epsilon, delta
    exp(-H)). p is the target's distribution under the run's temperature, top-k and top-p, and H is
    its entropy. With epsilon 1 and delta 1e9 the rule is off, and the method generates the same
    tokens as standard speculative sampling (`sps`).
    Differs from the paper: a draft model drafts, not draft heads. The paper always accepts the
    first token of a step; here the lossless rule decides first. A token that both rules reject is
    replaced by the lossless rule's token.

    One step is the same as in `sps` with `accept=typical`.
    """

    name: ClassVar[str] = "typical"
    proposed_in: ClassVar[tuple[str, ...]] = ("cai2024medusa",)
    sets: ClassVar[Literal["typical"]] = "typical"
    Params: ClassVar[type[TypicalParams]] = TypicalParams
    params: TypicalParams
    exact_params: ClassVar[Mapping[str, Any]] = {"epsilon": 1.0, "delta": 1e9}


class LenientParams(PresetParams):
    """Parameters of `Lenience`."""

    factor: float = Field(
        0.5,
        ge=0,
        le=1,
        description="lenience: the draft's probability q is multiplied by this factor before it"
        " is compared with p; 1 makes the method lossless",
    )


class Lenience(_Preset):
    """Lenient: accepts draft tokens as if their target probability p were larger by a factor.

    Yaniv Leviathan, Matan Kalman, Yossi Matias: Fast Inference from Transformers via Speculative
    Decoding, ICML 2023, arXiv:2211.17192, appendix A.5.

    Not exact: a draft token x, drawn from q, is accepted with probability min(1, p(x) / (factor
    q(x))), where factor <= 1. A token is then generated with probability at most p(x) / factor.
    With factor 1 the rule is off, and the method generates the same tokens as standard speculative
    sampling (`sps`).
    Differs from the paper in no point with the option `--verify rejection`. In greedy decoding the
    paper accepts x if p(x) >= factor max p. Coupled sampling (all methods share the Gumbel noise)
    makes the same comparison, on log p + noise instead of log p.

    One step is the same as in `sps` with `accept=lenient`.
    """

    name: ClassVar[str] = "lenient"
    aliases: ClassVar[tuple[str, ...]] = ("lenience",)
    proposed_in: ClassVar[tuple[str, ...]] = ("leviathan2023fast",)
    sets: ClassVar[Literal["lenient"]] = "lenient"
    Params: ClassVar[type[LenientParams]] = LenientParams
    params: LenientParams
    exact_params: ClassVar[Mapping[str, Any]] = {"factor": 1.0}


class RandomAcceptParams(PresetParams):
    """Parameters of `RandomAcceptance`."""

    rate: float = Field(
        0.1,
        ge=0,
        le=1,
        description="share of the rejected tokens that are accepted; 0 makes the method lossless",
    )
    like: str | None = Field(
        None,
        description="name of a method of the run whose measured acceptance rate replaces `rate`",
    )


class RandomAcceptance(_Preset):
    """Random accept: accepts rejected draft tokens at random, as a baseline for lossy rules.

    Not exact, and not meant for use. Compare a lossy rule with this rule at the same acceptance
    rate. If its answers are not better, the lossy rule selects no better than chance. With rate 0
    the rule is off, and the method generates the same tokens as standard speculative sampling
    (`sps`).

    One step is the same as in `sps` with `accept=random`.
    """

    name: ClassVar[str] = "random-accept"
    sets: ClassVar[Literal["random"]] = "random"
    Params: ClassVar[type[RandomAcceptParams]] = RandomAcceptParams
    params: RandomAcceptParams
    exact_params: ClassVar[Mapping[str, Any]] = {"rate": 0.0}
    control: ClassVar[bool] = True

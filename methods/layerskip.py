"""LayerSkip: self-speculative decoding by an early exit.

Mostafa Elhoushi, Akshat Shrivastava, Diana Liskovich, Basil Hosmer, Bram Wasti, Liangzhen Lai, Anas
Mahmoud, Bilge Acun, Saurabh Agarwal, Ahmed Roman, Ahmed A Aly, Beidi Chen, Carole-Jean Wu:
LayerSkip: Enabling Early Exit Inference and Self-Speculative Decoding, ACL 2024, arXiv:2404.16710.
"""

from __future__ import annotations

from typing import ClassVar

from specbench_cli.api import Draft, Field, Method, MethodParams, Pick, Session, Tokens


class LayerSkipParams(MethodParams):
    """Parameters of `LayerSkip`."""

    exit: int | None = Field(
        None, ge=1, description="layers that draft (E); a quarter of them if not given"
    )
    length: int = Field(6, ge=1, description="draft tokens a step (K)")


class LayerSkip(Method):
    """LayerSkip: the target's first layers draft, the others verify and go on from their rows.

    Exact because each draft token stands by the target's distribution and the distribution it was
    drawn from, whether the model was trained to exit early or not: that decides how many stand.
    Keys, values and exit rows of the first layers are the target's own, since they are those of the
    same tokens. Differs from the authors' code: nobody looks for an EOS in the draft, which would
    be a wait for each token; what is behind one is not committed.

    One step:
    1. x is the last committed token, whose row is in no layer.
    2. K times: run layers 1 to E on x, behind the target's own keys and values; draw the next x
       from the exit's distribution, its row through the model's own final norm and output matrix.
    3. (engine) Layers 1 to E over the last x alone; layers E + 1 to the last over the rows that
       left layer E, of the last committed token and all drafted ones; verify; commit.
    4. (engine) Forget the rows of rejected tokens, in all layers.
    """

    name: ClassVar[str] = "layerskip"
    family: ClassVar[str] = "the target itself, or a part of it"
    proposed_in: ClassVar[tuple[str, ...]] = ("elhoushi2024layerskip",)
    Params: ClassVar[type[MethodParams]] = LayerSkipParams
    params: LayerSkipParams

    def start(self, session: Session) -> None:
        """Take the first layers, whose rows the target goes on from (`keep`)."""
        end = self.params.exit or max(1, session.target.n_layers // 4)
        self.part = session.partial(layers=(0, end), keep=True)

    def propose(self, session: Session, limit: int) -> Draft:
        """Steps 1 and 2."""
        picks = list[Pick]()
        # 1. One token, but before the first step also what the target has not read.
        x = session.pending_tokens(session.state.length())
        while len(picks) < min(self.params.length, limit):
            # 2. x_i ~ q_i, the distribution at the exit.
            out = self.part.forward(x, session.state)
            picks.append(session.pick(out, len(picks)))
            x = Tokens(picks[-1][0][None])
        return session.chain_of_picks(picks)

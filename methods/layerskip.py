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
        None,
        ge=1,
        description="number of first layers that draft (E in the paper); by default a quarter"
        " of the layers",
    )
    length: int = Field(
        6, ge=1, description="number of draft tokens per step (K in the paper; authors' example: 6)"
    )


class LayerSkip(Method):
    """LayerSkip: the target's first layers draft. Its other layers verify from their output.

    Lossless because each draft token is verified against the target by speculative sampling, with
    the distribution that it was drawn from. Training for early exit changes the acceptance rate
    only. Drafting computes the same keys, values and hidden states in the first layers as the
    target. Differs from the authors' code: drafting does not stop at an EOS, because that check
    would add one GPU synchronisation per token. Tokens after an EOS are not committed.

    One step:
    1. x is the last committed token, which is in no layer's KV cache yet.
    2. K times: run layers 1 to E on x, on the target's own KV cache. Apply the final norm and the
       output matrix to the result, and draw the next x from that distribution.
    3. (engine) Run layers 1 to E on the last x, and layers E + 1 to the last on the hidden states
       of the last committed token and all draft tokens; verify; commit.
    4. (engine) Drop the KV entries of rejected tokens in all layers.
    """

    name: ClassVar[str] = "layerskip"
    family: ClassVar[str] = "the target itself, or a part of it"
    proposed_in: ClassVar[tuple[str, ...]] = ("elhoushi2024layerskip",)
    Params: ClassVar[type[MethodParams]] = LayerSkipParams
    params: LayerSkipParams

    def start(self, session: Session) -> None:
        """Select the first layers for drafting.

        Store their output, from which the target continues.
        """
        end = self.params.exit or max(1, session.target.n_layers // 4)
        self.part = session.partial(layers=(0, end), keep=True)

    def propose(self, session: Session, limit: int) -> Draft:
        """Return the draft of one decoding step: steps 1 and 2 of the class docstring."""
        picks = list[Pick]()
        # Step 1: Usually x is one token. After the prefill or a full acceptance it can be more
        # tokens.
        x = session.pending_tokens(session.state.length())
        while len(picks) < min(self.params.length, limit):
            # Step 2: Draw x_i from q_i, the distribution after the exit layer.
            out = self.part.forward(x, session.state)
            picks.append(session.pick(out, len(picks)))
            x = Tokens(picks[-1][0][None])
        return session.chain_of_picks(picks)

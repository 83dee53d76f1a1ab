"""Plain decoding with the target: the baseline of every speedup and the oracle of every output."""

from __future__ import annotations

from typing import ClassVar

from specbench_cli.api import Draft, Method, Session


class Vanilla(Method):
    """Vanilla autoregressive decoding: one target forward a token.

    Exact by definition. It runs through the same loop, the same verifier and the same stop rule as
    every other method, with nothing drafted, so that a speedup compares methods and not programs.
    """

    name: ClassVar[str] = "vanilla"
    aliases: ClassVar[tuple[str, ...]] = ("autoregressive", "ar")
    family: ClassVar[str] = "nothing"
    proposes: ClassVar[bool] = False

    def propose(self, session: Session, limit: int) -> Draft:
        """Nothing."""
        return session.chain(())

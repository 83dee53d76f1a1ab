"""Plain decoding with the target: the baseline for speedups, and the reference for outputs."""

from __future__ import annotations

from typing import ClassVar

from specbench_cli.api import Draft, Method, Session


class Vanilla(Method):
    """Vanilla autoregressive decoding: one target forward per token.

    Lossless by definition. It uses the same loop, verifier and stop rule as every other method,
    with an empty draft, so that a speedup compares methods and not implementations.
    """

    name: ClassVar[str] = "vanilla"
    aliases: ClassVar[tuple[str, ...]] = ("autoregressive", "ar")
    family: ClassVar[str] = "nothing"
    proposes: ClassVar[bool] = False

    def propose(self, session: Session, limit: int) -> Draft:
        """Return an empty draft, so that every step decodes one token."""
        return session.chain(())

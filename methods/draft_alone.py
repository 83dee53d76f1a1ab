"""Decoding with the draft model alone: a baseline for the quality and speed of lossy methods."""

from __future__ import annotations

from typing import ClassVar, Literal

from specbench_cli.api import Draft, Guarantee, Method, Rule, Session


class DraftAlone(Method):
    """Draft alone: plain decoding with the draft model, a baseline for lossy methods.

    Not exact: the target is not used. A method that trades quality for speed must be better than
    the draft model alone. The draft model gets the same prompt and the same stop rule as the
    target.
    """

    name: ClassVar[str] = "draft-alone"
    family: ClassVar[str] = "a draft model"
    lossy: ClassVar[bool] = True
    needs: ClassVar[frozenset[str]] = frozenset({"draft"})
    decodes: ClassVar[Literal["target", "draft"]] = "draft"
    control: ClassVar[bool] = True
    proposes: ClassVar[bool] = False

    def guarantee(self, sampling: Rule) -> Guarantee:
        """Return "quality_only", because the target is not used."""
        return "quality_only"

    def propose(self, session: Session, limit: int) -> Draft:
        """Return an empty draft, so that every step decodes one token."""
        return session.chain(())

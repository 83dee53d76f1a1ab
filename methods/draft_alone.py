"""The draft model alone: a control for the quality and speed of lossy methods."""

from __future__ import annotations

from typing import ClassVar, Literal

from specbench_cli.api import Draft, Guarantee, Method, Rule, Session


class DraftAlone(Method):
    """Draft alone: plain decoding with the draft model, a control for lossy methods.

    Not exact: the target takes no part. A method that trades quality for speed must do better than
    this. The draft model gets the target's prompt and the same stop rule.
    """

    name: ClassVar[str] = "draft-alone"
    family: ClassVar[str] = "a draft model"
    lossy: ClassVar[bool] = True
    needs: ClassVar[frozenset[str]] = frozenset({"draft"})
    decodes: ClassVar[Literal["target", "draft"]] = "draft"
    control: ClassVar[bool] = True
    proposes: ClassVar[bool] = False

    def guarantee(self, sampling: Rule) -> Guarantee:
        """Return "quality_only": the target takes no part."""
        return "quality_only"

    def propose(self, session: Session, limit: int) -> Draft:
        """Return an empty draft."""
        return session.chain(())

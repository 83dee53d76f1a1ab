"""The draft model by itself: what is left of an answer, and of its time, where no target looks."""

from __future__ import annotations

from typing import ClassVar, Literal

from specbench_cli.api import Draft, Guarantee, Method, Rule, Session


class DraftAlone(Method):
    """Draft alone: plain decoding with the draft model; a control of all that is not exact.

    Not exact, and no way to decode with a target: whatever trades quality for speed must be better
    than this. The draft reads the target's prompt and ends as the target does.
    """

    name: ClassVar[str] = "draft-alone"
    family: ClassVar[str] = "a draft model"
    lossy: ClassVar[bool] = True
    needs: ClassVar[frozenset[str]] = frozenset({"draft"})
    decodes: ClassVar[Literal["target", "draft"]] = "draft"
    control: ClassVar[bool] = True
    proposes: ClassVar[bool] = False

    def guarantee(self, sampling: Rule) -> Guarantee:
        """The target has no say."""
        return "quality_only"

    def propose(self, session: Session, limit: int) -> Draft:
        """Nothing."""
        return session.chain(())

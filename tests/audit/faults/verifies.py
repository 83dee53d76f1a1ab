"""A base of faulty methods that verify their drafts in their own way."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

from torch import Tensor

from specbench_cli.engine.method import Method
from specbench_cli.engine.session import Session
from specbench_cli.engine.types import Draft, Outcome


class Verifies(Method):
    """Method whose `verify` stands in for the session's, which is `verified`."""

    verified: Callable[..., Outcome]

    def start(self, session: Session) -> None:
        super().start(session)
        self.verified = session.verify
        session.verify = partial(self.verify, session)

    def verify(self, session: Session, draft: Draft, rows: Tensor, *accept: Any) -> Outcome:
        raise NotImplementedError

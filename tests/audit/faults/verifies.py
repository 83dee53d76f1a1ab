"""A base of faulty methods that verify their drafts in their own way."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial

from specbench_cli.engine.method import Method
from specbench_cli.engine.types import Outcome


class Verifies(Method):
    """Method whose `verify` stands in for the session's, which is `verified`."""

    verified: Callable[..., Outcome]

    def start(self, session):
        super().start(session)
        self.verified = session.verify
        session.verify = partial(self.verify, session)

    def verify(self, session, draft, rows, *accept):
        raise NotImplementedError

"""Base class of faulty methods that verify their drafts themselves."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial

from specbench_cli.engine.method import Method
from specbench_cli.engine.types import Outcome


class Verifies(Method):
    """Method whose `verify` replaces the session's. The original is `verified`."""

    verified: Callable[..., Outcome]

    def start(self, session):
        super().start(session)
        self.verified = session.verify
        session.verify = partial(self.verify, session)

    def verify(self, session, draft, rows, *accept):
        raise NotImplementedError

"""The stable surface for authors of methods; changes follow semantic versioning.

>>> from specbench_cli.api import Method, MethodParams, Draft, Session
"""

from pydantic import Field

from specbench_cli.engine.method import Claim, Guarantee, Method
from specbench_cli.engine.models.head import Artifact, Head, Trained
from specbench_cli.engine.params import MethodParams
from specbench_cli.engine.session import Session
from specbench_cli.engine.types import Draft, Features, Hidden, Outcome, Step, Tokens
from specbench_cli.engine.workers.drafter import Desk, Drafter
from specbench_cli.engine.workers.message import Message
from specbench_cli.errors import EnvironmentFault, MethodFault, UsageError

__all__ = [
    "Artifact",
    "Claim",
    "Desk",
    "Draft",
    "Drafter",
    "EnvironmentFault",
    "Features",
    "Field",
    "Guarantee",
    "Head",
    "Hidden",
    "Message",
    "Method",
    "MethodFault",
    "MethodParams",
    "Outcome",
    "Session",
    "Step",
    "Tokens",
    "Trained",
    "UsageError",
]

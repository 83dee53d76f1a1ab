"""Fixtures of the engine's tests: models that are tables."""

from __future__ import annotations

from collections.abc import Callable, Hashable, Sequence
from functools import partial

import pytest
import torch
from torch import Tensor

from specbench_cli.audit.enumeration import Distribution, compute_distribution
from specbench_cli.audit.models import table as table_model
from specbench_cli.audit.models.head import make_table_artifact
from specbench_cli.audit.models.table import TableDecoder, make_exit_table
from specbench_cli.engine.drafting.vocabulary import Translation
from specbench_cli.engine.request import Request
from specbench_cli.engine.sequence import StopRule
from specbench_cli.engine.session import Session
from specbench_cli.engine.verify.random import Random
from specbench_cli.engine.verify.sampling import Sampling
from specbench_cli.engine.workspace import Workspace


@pytest.fixture(autouse=True)
def _one_thread(one_thread: None) -> None:
    pass


@pytest.fixture(scope="session")
def table_decoder() -> type[TableDecoder]:
    return TableDecoder


@pytest.fixture(scope="session")
def exact_distribution() -> Callable[[Callable[[Random], Hashable]], Distribution]:
    return torch.inference_mode()(compute_distribution)


def workspace_of(
    target: Tensor, draft: Tensor | None, capacity: int, translation: Translation | None = None
) -> Workspace:
    decoders = {"target": TableDecoder("target", target, make_exit_table(target), inner=2)}
    if draft is not None:
        decoders["draft"] = TableDecoder("draft", draft, make_exit_table(draft), inner=2)
        decoders["draft"].translation = translation
    return Workspace(decoders, capacity, load_artifact=partial(make_table_artifact, decoders))


@pytest.fixture(scope="session")
def open_workspace() -> Callable[..., Workspace]:
    """Function that makes a `Workspace` of table models, for the `workspace` argument of
    `open_session`."""
    return workspace_of


@pytest.fixture(scope="session")
def open_session() -> Callable[..., Session]:
    """Function that opens a session on table models, from the tables and the parts of a request."""

    def make(
        target: Tensor,
        draft: Tensor | None = None,
        *,
        prompt: Sequence[int] = (0,),
        eos: Sequence[int] = (),
        budget: int = 8,
        sampling: Sampling | None = None,
        kind: type[Session] = Session,
        translation: Translation | None = None,
        workspace: Workspace | None = None,
        **rest: object,
    ) -> Session:
        stop = {key: rest.pop(key) for key in ("strings", "decode") if key in rest}
        return kind(
            workspace or workspace_of(target, draft, len(prompt) + budget, translation),
            Request("table/0", 0, tuple(prompt), StopRule(frozenset(eos), budget, **stop)),
            sampling or Sampling(),
            **rest,
        )

    return make


@pytest.fixture(scope="session")
def random_table() -> Callable[..., Tensor]:
    return table_model.random_table


@pytest.fixture(scope="session")
def successor_table() -> Callable[..., Tensor]:
    return table_model.successor_table

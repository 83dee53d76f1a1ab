"""Audit on the shipped model pair: the check of sampled tokens."""

import pytest
import torch

from methods.sps import Sps, SpsParams
from specbench_cli.audit.checks import embedded
from specbench_cli.audit.checks.embedded import (
    _probability_integrals,
    check_embedded,
    pearson_statistic,
)
from specbench_cli.audit.runner import run_checks
from specbench_cli.audit.subject import AuditSubject
from tests.audit.faults.distributions import ReportsFifty


def test_probability_positions_are_uniform_only_for_the_true_distribution():
    generator = torch.Generator().manual_seed(0)
    distributions = torch.rand(2_000, 50, generator=generator, dtype=torch.float64) ** 4
    distributions /= distributions.sum(-1, keepdim=True)
    u = torch.rand(len(distributions), generator=generator, dtype=torch.float64)
    drawn, other = (
        torch.multinomial(each, 1, generator=generator)[:, 0]
        for each in (distributions, distributions.sqrt())
    )
    for keys in (distributions, torch.rand(distributions.shape, generator=generator)):
        assert (
            pearson_statistic(_probability_integrals(distributions, keys, drawn, u).tolist()) < 30
        )
    assert (
        pearson_statistic(_probability_integrals(distributions, distributions, other, u).tolist())
        > 100
    )


class DraftOnly(ReportsFifty):
    """Method that commits its draft tokens unverified."""

    def start(self, session):
        super().start(session)
        verified = session.verify

        def verify(draft, rows, *accept):
            if draft.nodes:
                rows = rows.clone()
                rows[: draft.nodes] = draft.q.log().clamp_min(-60.0)
            return verified(draft, rows, *accept)

        session.verify = verify


@pytest.mark.parametrize("wrong", [False, True])
def test_an_unverified_draft_is_found_on_the_shipped_pair(wrong, monkeypatch):
    monkeypatch.setattr(embedded, "TOKENS", 400)
    method = DraftOnly if wrong else Sps
    subject = AuditSubject("sps", method, (SpsParams(length=4),))
    (found,) = run_checks(subject, {"embedded": check_embedded})
    assert found.passed is not wrong, found
    assert found.figure["tokens"] == 400

"""Expected number of accepted siblings, and the checks on complete trees of each draw mode."""

import pytest
import torch

from methods.sps_tree import SpsTree, SpsTreeParams
from specbench_cli.audit.checks import distribution as checks_distribution
from specbench_cli.audit.checks.overlap import acceptance_probabilities
from specbench_cli.audit.enumeration import enumerate_outcomes
from specbench_cli.audit.runner import TABLE_CHECKS, run_checks
from specbench_cli.audit.subject import AuditSubject
from specbench_cli.engine.verify.choosing import draw_siblings
from specbench_cli.engine.verify.siblings import multi_round
from specbench_cli.engine.verify.tree import build_tree


@pytest.mark.parametrize(
    ("draw_mode", "depth"),
    [
        ("without_replacement", 1),
        ("independent", 1),
        ("deterministic", 2),
        ("without_replacement", 2),
    ],
)
@pytest.mark.usefixtures("short_audit")
def test_a_complete_tree_passes(draw_mode, depth, monkeypatch):
    monkeypatch.setattr(checks_distribution, "OUTCOME_BUDGET", {"rejection": 300})
    monkeypatch.setattr(checks_distribution, "MAX_OUTCOMES", 300)
    params = SpsTreeParams(draw_mode=draw_mode, widths=(2,) * depth)
    found = run_checks(AuditSubject("sps-tree", SpsTree, (params,)), TABLE_CHECKS)
    assert [finding.problem for finding in found if not finding.passed] == []
    assert "acceptance" in {finding.check for finding in found}


DISTRIBUTIONS = [
    ([0.5, 0.3, 0.2], [0.2, 0.3, 0.5]),
    ([0.9, 0.1, 0.0], [0.1, 0.2, 0.7]),
    ([0.2, 0.3, 0.5], [0.0, 1.0, 0.0]),  # tokens with q = 0 are equally likely
    ([0.2, 0.3, 0.5], [0.2, 0.3, 0.5]),
]


@pytest.mark.parametrize("replacement", [True, False])
@pytest.mark.parametrize("draws", [1, 2, 3, "until 0 is drawn"])
@pytest.mark.parametrize(("p", "q"), DISTRIBUTIONS)
def test_siblings_are_accepted_as_often_as_their_probabilities_add_up_to(p, q, draws, replacement):
    """Include the case in which the drawn tokens decide how many siblings there are."""
    distribution, drafted = torch.tensor([p] * 4).double(), torch.tensor([q]).double()

    def accepted_siblings(random):
        ids = draw_siblings(drafted, 3, random, replacement=replacement)[0].tolist()
        if draws != "until 0 is drawn":
            ids = ids[:draws]
        elif 0 in ids:
            ids = ids[: ids.index(0) + 1]
        rows, tree = drafted.expand(len(ids), -1), build_tree((-1,) * len(ids))
        path, _ = multi_round(tree, ids, rows, distribution, random, replacement=replacement)
        tested = ids[: path[0] + 1] if path else ids
        return len(path), sum(acceptance_probabilities(p, q, tested, with_replacement=replacement))

    walked = list(enumerate_outcomes(accepted_siblings))
    accepted, due = (sum(weight * found[i] for found, weight in walked) for i in (0, 1))
    assert due == pytest.approx(accepted)

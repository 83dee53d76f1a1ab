"""How many siblings should stand; and the minimal tree method, a plug-in, under the checks."""

import importlib.util
import sys
from pathlib import Path

import pytest
import torch

from specbench_cli.audit.checks import law as checks_law
from specbench_cli.audit.checks import sampled as checks_sampled
from specbench_cli.audit.checks.overlap import chance
from specbench_cli.audit.choice import walk
from specbench_cli.audit.runner import TABLE_CHECKS, run_checks
from specbench_cli.audit.subject import Subject
from specbench_cli.engine.verify.choosing import siblings
from specbench_cli.engine.verify.siblings import multi_round
from specbench_cli.engine.verify.tree import tree_of

FILE = Path(__file__).parents[1] / "methods" / "tree_method.py"


def tree_module():
    spec = importlib.util.spec_from_file_location("tree_method_under_audit", FILE)
    module = importlib.util.module_from_spec(spec)
    sys.modules[spec.name] = module  # where pydantic looks for the names in annotations
    spec.loader.exec_module(module)
    return module


TREES = tree_module()


@pytest.mark.parametrize(("law", "depth"), [("wor", 1), ("iid", 1), ("point", 2), ("wor", 2)])
def test_the_tree_method_itself_passes(law, depth, monkeypatch):
    monkeypatch.setattr(checks_law, "BUDGET", {"rejection": 800})
    monkeypatch.setattr(checks_sampled, "TOKENS", 1_000)
    params = TREES.PlainTreeParams(law=law, depth=depth)
    found = run_checks(Subject("plain-tree", TREES.PlainTree, (params,)), TABLE_CHECKS)
    assert [finding.problem for finding in found if not finding.passed] == []
    assert "acceptance" in {finding.check for finding in found}


LAWS = [
    ([0.5, 0.3, 0.2], [0.2, 0.3, 0.5]),
    ([0.9, 0.1, 0.0], [0.1, 0.2, 0.7]),
    ([0.2, 0.3, 0.5], [0.0, 1.0, 0.0]),  # beyond q's support all others are drawn alike
    ([0.2, 0.3, 0.5], [0.2, 0.3, 0.5]),
]


@pytest.mark.parametrize("replacement", [True, False])
@pytest.mark.parametrize("draws", [1, 2, 3])
@pytest.mark.parametrize(("p", "q"), LAWS)
def test_the_chance_that_a_sibling_stands_is_that_of_all_outcomes(p, q, draws, replacement):
    law, drafted = torch.tensor([p] * (draws + 1)).double(), torch.tensor([q]).double()
    parents = (-1,) * draws

    def stands(random):
        ids = siblings(drafted, draws, random, replacement=replacement)[0].tolist()
        rows = drafted.expand(draws, -1)
        tree = tree_of(parents)
        path, _ = multi_round(tree, ids, rows, law, random, replacement=replacement)
        return bool(path)

    walked = walk(stands)
    assert chance(p, q, draws, replacement=replacement) == pytest.approx(walked.get(True, 0.0))

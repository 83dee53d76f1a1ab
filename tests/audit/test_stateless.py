"""Audit of heads without state: their table models, and the bounds that apply to them."""

from pathlib import Path

import pytest
import torch

from specbench_cli import registry
from specbench_cli.api import ArtifactSpec, FeatureHead, fill_from
from specbench_cli.audit.cases import Case
from specbench_cli.audit.checks.bookkeeping import check_bookkeeping
from specbench_cli.audit.checks.bounds import check_bounds
from specbench_cli.audit.checks.declarations import check_declarations
from specbench_cli.audit.models.head import TableFeatureHead
from specbench_cli.audit.models.table import make_table_pair, random_table
from specbench_cli.audit.subject import AuditSubject
from specbench_cli.engine.verify.sampling import Sampling

FILE = Path(__file__).parents[1] / "capabilities" / "plugins" / "stateless_head.py"
registry.load_plugin(str(FILE))
Linear = registry.load("linear")
(HEAD,) = (wanted.kind for wanted in Linear(Linear.Params()).artifacts())
NAMES = ["twin draft", "mixed draft", "useless draft"]


def list_bounds(method, *params):
    return check_bounds(AuditSubject("linear", method, params or (Linear.Params(),)))


def test_a_table_predicts_the_tokens_after_the_targets_choice():
    target, draft = make_table_pair("near", 5)
    case = Case("near", (target, draft), Sampling(), prompt=(1, 0, 2))
    session = case.open()
    method = Linear(Linear.Params())
    method.start(session)
    session.prefill()
    head = method.head.head
    assert isinstance(head, HEAD) and isinstance(head, TableFeatureHead)
    logits = method.head(session.features())
    root = session.tokens()[-1]
    first = int(draft[2, root].argmax())
    assert logits.shape == (3, 1, 5)
    assert torch.equal(logits[0, 0], draft[2, root])
    assert torch.equal(logits[1, 0], draft[root, first])
    assert session.stateless_heads == (head,)
    assert session.drafted_by_tables


def test_all_bounds_apply_to_a_correct_head():
    found = list_bounds(Linear)
    assert [(each.check, each.passed) for each in found] == [(name, True) for name in NAMES]
    assert all(each.figure["steps"] > 0 for each in found)


class Stale(Linear):
    """Method that drafts from the features of the previous step."""

    def start(self, session):
        super().start(session)
        self.kept = []

    def propose(self, session, limit):
        self.kept = [*self.kept[-1:], session.features()]
        return fill_from(self.tree, self.head(self.kept[0])[:, 0], session)


class LevelLate(Linear):
    """Method that fills each level with the tokens of the next level."""

    def propose(self, session, limit):
        return fill_from(self.tree, self.head(session.features())[1:, 0], session)


@pytest.mark.parametrize("fault", [Stale, LevelLate])
def test_stale_features_and_shifted_levels_are_found_by_the_twin_draft(fault):
    twin, mixed, useless = list_bounds(fault)
    assert not twin.passed
    assert not mixed.passed
    assert "commits" in twin.problem.what
    assert "features of another token" in twin.problem.look
    assert useless.passed


class ByLevels(FeatureHead):
    """Head that computes one level per call, from the features and the level.

    No table can represent its logits.
    """

    kind = "by-levels"

    def forward(self, rows, level):
        return self.target.unembed(rows.roll(level, -1))


class Sequential(Linear):
    def artifacts(self):
        return (ArtifactSpec(ByLevels, self.params.head),)

    def start(self, session):
        self.head = session.artifact(*self.artifacts())
        session.capture_layers(self.head.captured_layers)

    def propose(self, session, limit):
        rows = session.features()
        levels = [self.head(rows, level) for level in range(min(2, limit))]
        return session.chain([int(each[0].argmax()) for each in levels])


def test_no_bound_applies_to_a_head_that_no_table_can_represent():
    assert list_bounds(Sequential) == []
    found = check_bookkeeping(AuditSubject("linear", Sequential, (Linear.Params(),)))
    assert [(each.check, each.passed) for each in found] == [
        ("states", True),
        ("counters", True),
        ("clock", True),
    ]


def test_a_declared_and_used_head_is_not_reported():
    (found,) = check_declarations(AuditSubject.from_method("fine", Linear))
    assert found.passed


def test_a_feature_that_the_target_did_not_compute_is_found():
    target, draft = random_table(4, 1), random_table(4, 2)
    case = Case("near", (target, draft), Sampling(), prompt=(1, 0, 2))
    head = case.create_workspace().artifact(ArtifactSpec(HEAD))
    right, wrong = head(target[2, 1][None]), head(target[2, 1][None] + 1)
    assert torch.equal(right[0, 0], draft[1, int(target[2, 1].argmax())])
    assert not torch.equal(right, wrong)

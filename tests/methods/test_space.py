"""SPACE's masks in the target's forward, compared with transformers' layers on each path."""

from __future__ import annotations

import json

import pytest
import torch

from methods.space.head import PUBLISHED_MASK, MaskToken
from methods.space.method import Space
from specbench_cli.audit.cases import Case
from specbench_cli.audit.checks.bounds import check_bounds
from specbench_cli.audit.enumeration import total_variation
from specbench_cli.audit.models import table
from specbench_cli.audit.models.table import make_table_pair
from specbench_cli.audit.subject import AuditSubject
from specbench_cli.engine import look_ahead
from specbench_cli.engine.look_ahead import append_branches
from specbench_cli.engine.verify.sampling import Sampling
from specbench_cli.errors import EnvironmentFault
from tests.methods.exact import distance_from_target, target_distribution


@pytest.fixture(scope="module")
def head(family):
    return MaskToken.random({"target": family.decoders["target"]})


def by_transformers(module, head, ids):
    """Return the logits of the text's last row and of the masks after it, in one causal forward."""
    k = head.sizes["levels"]
    rows = module.model.embed_tokens(torch.tensor([ids]))
    rows = torch.cat((rows, head.mask.expand(1, k, -1)), 1)
    return module(inputs_embeds=rows, use_cache=False).logits[0, len(ids) - 1 :]


def test_each_mask_group_predicts_what_it_predicts_alone(drafting, family, head):
    method, module = Space(Space.Params(length=3)), family.modules["target"]
    session = drafting(method, head, 7)
    due = by_transformers(module, head, list(family.prompts[7]))
    torch.testing.assert_close(method.masks.latest_logits(), due[1:], rtol=1e-4, atol=1e-4)
    for _ in range(3):
        text = list(session.tokens())
        best = method.masks.latest_logits().argmax(-1).tolist()
        draft = method.propose(session, 9)
        assert draft.tokens.tolist() == best[:3]  # greedy: each mask's likeliest token
        rows = session.score(draft)
        for n in range(4):
            due = by_transformers(module, head, text + best[:n])
            torch.testing.assert_close(rows[n], due[0], rtol=1e-4, atol=1e-4)
            torch.testing.assert_close(method.masks._logits[n], due[1:], rtol=1e-4, atol=1e-4)
        session.commit(session.verify(draft, rows))
        assert session.state.length() == len(session.tokens()) - 1  # no row of a mask is kept
    assert len(method.propose(session, 1).tokens) == 1
    assert len(method.propose(session, 0).tokens) == 0


def test_two_masks_after_each_of_three_tokens_see_what_the_paper_shows():
    sight, places = append_branches(
        torch.ones(3, 3, dtype=torch.bool).tril(), torch.tensor([7, 8, 9]), 2
    )
    assert places.tolist() == [7, 8, 9, 8, 9, 9, 10, 10, 11]
    assert sight.int().tolist() == [
        [1, 0, 0, 0, 0, 0, 0, 0, 0],  # x
        [1, 1, 0, 0, 0, 0, 0, 0, 0],  # c_1
        [1, 1, 1, 0, 0, 0, 0, 0, 0],  # c_2
        [1, 0, 0, 1, 0, 0, 0, 0, 0],  # masks of x
        [1, 0, 0, 1, 1, 0, 0, 0, 0],
        [1, 1, 0, 0, 0, 1, 0, 0, 0],  # of c_1
        [1, 1, 0, 0, 0, 1, 1, 0, 0],
        [1, 1, 1, 0, 0, 0, 0, 1, 0],  # of c_2
        [1, 1, 1, 0, 0, 0, 0, 1, 1],
    ]
    assert len(sight) - 1 == 2 * (2 + 2)  # k (k + 2) tokens besides the last committed one


@pytest.mark.parametrize("fault", ["place", "seen"])
def test_misplaced_masks_are_caught_by_the_audit(monkeypatch, fault):
    right = look_ahead.append_branches

    def wrong(mask, positions, k):
        sight, places = right(mask, positions, k)
        n = len(mask)
        if fault == "place":
            places[n:] += 1
        else:
            sight[1:n, n] = True  # draft tokens see the first mask
        return sight, places

    monkeypatch.setattr(look_ahead, "append_branches", wrong)
    twin, *_ = check_bounds(AuditSubject("space", Space, (Space.Params(),)))
    assert not twin.passed


def test_on_tables_the_masks_predict_what_a_twin_of_the_target_would():
    case = Case("equal", make_table_pair("equal", 5), Sampling(), budget=12)
    session = case.open()
    steps = list(Space(Space.Params(length=3)).generate(session))
    assert [len(step.outcome.path) for step in steps] == [3, 3, 2]
    expected, text = case.tables[0], list(case.prompt)
    for token in session.output():
        assert token == int(expected[text[-2], text[-1]].argmax())
        text.append(token)
    ways = table.continue_greedily(expected, expected, (text[-2], text[-1]), 2)
    assert ways.shape == (2, 5)


def test_a_published_checkpoints_mask_is_a_row_of_its_embedding(family, tmp_path, monkeypatch):
    target = family.decoders["target"]
    (tmp_path / "config.json").write_text(json.dumps({"vocab_size": target.vocab_size}))
    message = rf"has 96 token ids, and the target has 96; .* {PUBLISHED_MASK}"
    with pytest.raises(EnvironmentFault, match=message):
        MaskToken.load(tmp_path, {"target": target})
    monkeypatch.setattr("methods.space.head.PUBLISHED_MASK", 90)
    head = MaskToken.load(tmp_path, {"target": target})
    assert head.sizes["levels"] == 5
    assert head.mask.equal(target.embed(torch.tensor([90]))[0])


# ---- above temperature 0: compared with the authors' rule
# ------------------------------------------


def test_above_temperature_zero_ours_is_the_targets_distribution_and_the_authors_rule_is_not():
    """Theirs takes a candidate with probability min(1, p/q), and draws from p where it does not."""
    case = Case("near", make_table_pair("near"), Sampling("rejection", 1.0), budget=3, length=2)
    assert distance_from_target(Space(Space.Params(length=1)), case) < 1e-9
    target, draft = (table.double().softmax(-1) for table in case.tables)
    before, last = case.prompt[-2:]
    q = draft[last, int(target[before, last].argmax())]  # the mask knows no drawn first token
    theirs = {}
    for first, p_first in enumerate(target[before, last].tolist()):
        p = target[last, first]
        accepted = torch.minimum(p, q)
        distribution = accepted + (1 - accepted.sum()) * p
        theirs |= {(first, x): p_first * float(each) for x, each in enumerate(distribution)}
    assert sum(theirs.values()) == pytest.approx(1)
    assert total_variation(theirs, target_distribution(case)) > 0.02

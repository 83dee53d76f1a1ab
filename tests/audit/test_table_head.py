"""Table head: its logits, and how it detects wrong input."""

import pytest
import torch

from methods.dflash.method import DFlash
from methods.mtp.method import Mtp, MtpParams
from methods.pard.method import Pard
from specbench_cli.audit.cases import Case
from specbench_cli.audit.checks.bookkeeping import check_bookkeeping
from specbench_cli.audit.checks.bounds import check_bounds
from specbench_cli.audit.models.head import (
    TableBlockHead,
    TableHead,
    TableParallel,
    find_wrong_features,
)
from specbench_cli.audit.models.observed_session import ObservedSession
from specbench_cli.audit.models.table import TableDecoder, find_wrong_rows, random_table
from specbench_cli.audit.subject import AuditSubject
from specbench_cli.engine.types import Features, Tokens
from specbench_cli.engine.verify.sampling import Sampling

TEXT = (2, 0, 3, 1, 1)
TARGET, TABLE = random_table(4, 1), random_table(4, 2)


def true_features(n):
    decoder = TableDecoder("target", TARGET)
    return decoder.forward(Tokens(torch.tensor([TEXT[:n]])), decoder.new_state(9)).hidden


def feed_head(ids, rows):
    head = TableHead(TABLE, TARGET)
    state = head.new_state(9)
    return head, state, head.forward(Features(torch.tensor([ids]), rows), state, logits_at="all")


def test_with_true_features_it_predicts_what_a_draft_model_with_its_table_predicts():
    _, state, out = feed_head(TEXT[1:], true_features(4))
    assert torch.equal(out.logits[0], TABLE[list(TEXT[:-1]), list(TEXT[1:])])
    assert find_wrong_rows(state, TEXT, first=1) is None
    assert find_wrong_features(state, TEXT, TARGET) is None


def test_with_its_own_features_it_drafts_on_and_the_row_counts_as_predicted():
    head, state, out = feed_head(TEXT[1:3], true_features(2))
    following = head.forward(Features(torch.tensor([[TEXT[3]]]), out.hidden[:, -1:]), state)
    assert torch.equal(following.logits[0, 0], TABLE[TEXT[2], TEXT[3]])
    wrong = "row 2 was made of features that are not the target's of token 2"
    assert find_wrong_features(state, TEXT, TARGET) == wrong


@pytest.mark.parametrize("shift", [-1, 1])
def test_shifted_features_change_its_logits(shift):
    _, state, out = feed_head(TEXT[1:], true_features(4).roll(shift, 1))
    assert not torch.equal(out.logits[0], TABLE[list(TEXT[:-1]), list(TEXT[1:])])
    assert find_wrong_features(state, TEXT, TARGET) is not None


def test_a_table_requires_tokens_and_a_head_requires_features():
    ids = torch.tensor([TEXT])
    target, head = TableDecoder("target", TARGET), TableHead(TABLE, TARGET)
    with pytest.raises(ValueError, match="reads Features"):
        head.forward(Tokens(ids), head.new_state(9))
    with pytest.raises(ValueError, match="reads Tokens"):
        target.forward(Features(ids, true_features(5)), target.new_state(9))


def greedy_rows(before, last, n):
    """Return the table's logits along its greedy continuation of two tokens."""
    rows = []
    for _ in range(n):
        rows.append(TABLE[before, last])
        before, last = last, int(rows[-1].argmax())
    return torch.stack(rows)


def test_masks_continue_greedily_and_a_parallel_head_keeps_no_state_of_them():
    draft, head = TableParallel(TABLE), TableBlockHead(TABLE, TARGET)
    state, masks = draft.new_state(12), (draft.mask,) * 3
    out = draft.forward(Tokens(torch.tensor([TEXT + masks])), state, logits_at="all")
    assert torch.equal(out.rows[-4:], greedy_rows(*TEXT[-2:], 4))
    assert find_wrong_rows(state, TEXT) == "8 rows for 5 committed tokens"
    state = head.new_state(12)
    x = Features(torch.tensor([TEXT[1:] + masks]), true_features(4))
    out = head.forward(x, state, logits_at="all")
    assert torch.equal(out.rows[1:], greedy_rows(*TEXT[-2:], 3))
    assert find_wrong_rows(state, TEXT, first=1) is None
    assert find_wrong_features(state, TEXT, TARGET) is None


class KeepsItsMasks(Pard):
    """Method that leaves mask tokens in its draft's state."""

    def propose(self, session, limit):
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(type(self.state), "rollback", lambda *_: None)
            return super().propose(session, limit)


class FeedsItsBlockLate(DFlash):
    """Method that starts its block one token too early."""

    def propose(self, session, limit):
        pending = session.pending_features
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(session, "pending_features", lambda n: shift_ids(pending(n)))
            return super().propose(session, limit)


def shift_ids(x):
    return Features(x.ids.roll(1, 1), x.rows)


@pytest.mark.parametrize("fault", [KeepsItsMasks, FeedsItsBlockLate])
def test_a_faulty_parallel_drafter_is_found(fault):
    subject = AuditSubject("faulty", fault, (fault.Params(length=3),))
    found = {
        each.check for each in (*check_bookkeeping(subject), *check_bounds(subject)) if each.problem
    }
    assert "states" in found


def test_any_requested_head_uses_the_drafts_table():
    case = Case("near", (TARGET, TABLE), Sampling())
    session = case.open()
    assert isinstance(session, ObservedSession)
    list(Mtp(MtpParams(length=2)).generate(session))
    head, state = session.model_states[-1]
    assert isinstance(head, TableHead)
    assert torch.equal(head.table, TABLE)
    assert 0 < state.length() < len(session.tokens()) - 1

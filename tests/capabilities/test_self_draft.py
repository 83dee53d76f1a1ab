"""Parts of the target as draft: exactness, state, and cost by the weights that they read."""

from __future__ import annotations

import random
from pathlib import Path

import pytest
import torch

from methods.vanilla import Vanilla
from specbench_cli import registry
from specbench_cli.audit.cases import Case
from specbench_cli.audit.checks.bookkeeping import check_bookkeeping
from specbench_cli.audit.checks.model import check_model
from specbench_cli.audit.checks.tokens import check_tokens
from specbench_cli.audit.models.observed_session import nominal_cost
from specbench_cli.audit.models.table import make_table_pair
from specbench_cli.audit.models.tiny import create_tiny_models
from specbench_cli.audit.runner import CHECKS, run_checks
from specbench_cli.audit.subject import AuditSubject
from specbench_cli.config.run import RunConfig
from specbench_cli.engine.models.load import load_decoder
from specbench_cli.engine.request import Request
from specbench_cli.engine.scoring import Scoring
from specbench_cli.engine.sequence import StopRule
from specbench_cli.engine.session import Session
from specbench_cli.engine.types import Draft, Hidden, Tokens
from specbench_cli.engine.verify.sampling import Sampling
from specbench_cli.engine.workspace import Workspace
from specbench_cli.errors import MethodFault
from specbench_cli.measure import run as execute
from specbench_cli.models.resolve import resolve
from specbench_cli.report.terminal.table import run_text
from specbench_cli.store.run_dir import RunDir
from specbench_cli.summary.facts import Facts
from specbench_cli.summary.summary import summarise
from tests.views import Silent

pytestmark = pytest.mark.usefixtures("one_thread")
FILE = Path(__file__).parent / "plugins" / "self_draft.py"
RULES = {"greedy": Sampling(), "coupled": Sampling("coupled", 0.8, seed=3)}


@pytest.fixture(scope="module")
def self_draft():
    registry.load_plugin(str(FILE))
    return registry.load("self-draft")


def open_target_session(target, ids, sampling, n=24):
    workspace = Workspace({"target": target}, capacity=len(ids) + n + 8)
    return Session(workspace, Request("some/0", 0, tuple(ids), StopRule(frozenset(), n)), sampling)


def tiny_session(prompt, n):
    """Open a session whose states no other session shares."""
    models = create_tiny_models()
    workspace = Workspace(models.workspace.decoders, models.workspace.capacity)
    request = Request(f"tiny/{prompt}", 0, models.prompts[prompt], StopRule(frozenset(), n))
    return Session(workspace, request, Sampling())


def random_ids(n, vocab):
    return torch.randint(5, vocab, (n,), generator=torch.Generator().manual_seed(n)).tolist()


# ---- exact --------------------------------------------------------------------------------------


def test_it_passes_the_whole_audit(self_draft):
    subject = AuditSubject.from_method("self-draft", self_draft)
    assert {params.keep for params in subject.variants} == {False, True}
    findings = run_checks(subject, CHECKS)
    assert {each.check for each in findings} >= {
        "distribution",
        "acceptance",
        "tokens",
        "states",
        "caches",
    }
    assert not [each for each in findings if not each.passed]


@pytest.mark.parametrize("rule", RULES)
@pytest.mark.parametrize("name", ["embedded-7m", "embedded-exit"])
def test_the_shipped_targets_emit_vanillas_tokens(self_draft, name, rule):
    target = load_decoder(resolve(name).path, name="target")
    ids = random_ids(12, target.vocab_size)
    plain = open_target_session(target, ids, RULES[rule])
    list(Vanilla().generate(plain))
    accepted = {}
    for end, keep in ((2, False), (4, False), (4, True), (8, False)):
        session = open_target_session(target, ids, RULES[rule])
        method = self_draft(self_draft.Params(exit=end, keep=keep))
        steps = list(method.generate(session))
        assert session.output() == plain.output()
        accepted[end] = sum(len(step.outcome.path) for step in steps)
    assert accepted[8] == 24 - 1 - len(steps)  # the draft is the whole target


@pytest.mark.parametrize("keep", [False, True])
@pytest.mark.parametrize("family", ["gpt2", "gemma3"])
def test_a_transformers_target_drafts_for_itself(self_draft, tiny_checkpoint, family, keep):
    target = load_decoder(tiny_checkpoint(family), name="target")
    plain = open_target_session(target, random_ids(9, 197), Sampling())
    list(Vanilla().generate(plain))
    for end in (1, 2, 3):
        session = open_target_session(target, random_ids(9, 197), Sampling())
        list(self_draft(self_draft.Params(exit=end, keep=keep)).generate(session))
        assert session.output() == plain.output()


def test_parts_that_are_not_rolled_back_fail_the_audit(self_draft, monkeypatch):
    def discard_nothing(scoring, *, keep=False):
        scoring._length_before_partial = scoring._pending = None
        return scoring.state.length()

    monkeypatch.setattr(Scoring, "discard_partial_rows", discard_nothing)
    findings = run_checks(
        AuditSubject.from_method("self-draft", self_draft), {"states": check_bookkeeping}
    )
    assert not all(each.passed for each in findings)


def test_continuing_from_rows_of_other_tokens_fails_the_audit(self_draft, monkeypatch):
    from specbench_cli.engine import scoring

    monkeypatch.setattr(
        scoring.PendingScore, "matches", lambda pending, x: pending.num_rows <= x.ids.shape[1]
    )

    class Other(self_draft):
        """Method that drafts other tokens than it fed."""

        def propose(self, session, limit):
            draft = super().propose(session, limit)
            return session.chain([(token + 1) % 3 for token in draft.tokens.tolist()])

    subject = AuditSubject("self-draft", Other, (Other.Params(keep=True, length=2),))
    assert not all(each.passed for each in check_tokens(subject))
    monkeypatch.undo()
    assert all(each.passed for each in check_tokens(subject))


@pytest.mark.parametrize(
    "part",
    [
        {"layers": (0, 1)},
        {"skip": [1]},
        {"skip": [(1, "attention")]},
        {"skip": [(0, "mlp"), (1, "mlp")]},
        {},
    ],
    ids=str,
)
def test_every_part_passes_the_audit_with_its_own_or_the_targets_state(self_draft, part):
    class Skipping(self_draft):
        """Method that drafts on the target's state."""

        def start(self, session):
            self.part = session.partial(**part)

    class OwnState(Skipping):
        """Method that drafts with a separate state."""

        def start(self, session):
            super().start(session)
            self.state = session.new_state(self.part)
            self.part.forward(session.pending_tokens(0), self.state, logits_at=None)

        def propose(self, session, limit):
            picks, x = [], session.pending_tokens(self.state.length())
            while len(picks) < min(limit, self.params.length):
                picks.append(session.pick(self.part.forward(x, self.state), len(picks)))
                x = Tokens(picks[-1][0][None])
            return session.chain_of_picks(picks)

        def observe(self, session, outcome):
            self.state.rollback(0, min(self.state.length(), len(session.tokens()) - 1))

    for kind, length in ((Skipping, 3), (OwnState, 2)):
        variants = (kind.Params(length=length),)
        subject = AuditSubject("self-draft", kind, variants)
        for check in (check_tokens, check_bookkeeping, check_model):
            assert not [each for each in check(subject) if not each.passed]


# ---- the target's state stays correct
# -------------------------------------------------------------


def run_random_parts(session, rng):
    """Run some forwards of parts on random tokens, with some rollbacks."""
    state, vocab = session.state, session.target.vocab_size
    base = state.length()
    parts = [
        session.partial(layers=(0, 1)),
        session.partial(layers=(0, 1), keep=True),
        session.partial(skip={0}),
        session.partial(skip={(1, "attention"), (0, "mlp")}),
        session.partial(),
    ]
    deeper = session.partial(layers=(1, 2))
    fed = session.tokens()[-1:]
    for _ in range(rng.randrange(5)):
        part = rng.choice(parts)
        tokens = rng.choice((fed, [rng.randrange(vocab) for _ in range(rng.randint(1, 2))]))
        out = part.forward(Tokens(torch.tensor([tokens])), state, logits_at="all")
        assert out.logits.shape == (1, len(tokens), vocab)
        if part in parts[:2] and rng.random() < 0.5:
            deeper.forward(Hidden(out.hidden), state)
        if rng.random() < 0.3:
            state.rollback(0, rng.randint(base, base + 2))


@pytest.mark.parametrize("tables", [False, True], ids=["llama", "tables"])
@pytest.mark.parametrize("seed", range(6))
def test_scores_and_states_equal_those_of_a_session_without_parts(tables, seed):
    def session():
        if tables:
            return Case("near", make_table_pair("near", 5), Sampling(), budget=12).open()
        return tiny_session(7, 12)

    rng = random.Random(seed)
    plain, own = session(), session()
    own.reserve(8)
    plain.reserve(8)
    meddle_first = own.partial(layers=(0, 1))
    meddle_first.forward(own.pending_tokens(0), own.state)
    for each in (plain, own):
        each.prefill()
    while plain.finish is None:
        draft = Draft(
            torch.tensor([rng.randrange(5) for _ in range(min(3, plain.max_draft_length()))]).long()
        )
        run_random_parts(own, rng)
        rows = [each.score(draft) for each in (plain, own)]
        if rng.random() < 0.3:
            run_random_parts(own, rng)
        assert float((rows[0] - rows[1]).abs().max()) <= 1e-5
        for each, own_rows in zip((plain, own), rows, strict=True):
            each.commit(each.verify(draft, own_rows))
        assert own.tokens() == plain.tokens()
        n = plain.state.length()
        assert [own.state.length(0, at) for at in (0, 1)] == [n, n]


@pytest.mark.parametrize("drafted", [[], [3], [3, 8], [3, 8, 9], [3, 8, 9, 4]], ids=len)
@pytest.mark.parametrize("same", [True, False])
def test_the_target_continues_from_the_first_layers_of_the_scored_tokens(drafted, same):
    fed = [3, 8] if same else [3, 7]
    plain, own = tiny_session(7, 12), tiny_session(7, 12)
    for session in (plain, own):
        session.prefill()
    part = own.partial(layers=(0, 1), keep=True)
    x = own.pending_tokens(own.state.length())
    for token in fed:
        part.forward(x, own.state)
        x = Tokens(torch.tensor([[token]]))
    part.forward(x, own.state)
    first = len(own.harness.meter.forwards)
    draft = Draft(torch.tensor(drafted).long())
    expected, found = plain.score(draft), own.score(draft)
    assert float((expected - found).abs().max()) <= 1e-5
    ran = [(f.layers, f.n_tokens, f.role) for f in own.harness.meter.forwards[first:]]
    m = len(drafted) + 1
    if not same or len(drafted) < 2:
        assert ran == [((0, 2), m, "verify")]
    else:
        pending = [((0, 1), m - 3, "verify")] if m > 3 else []
        assert ran == [*pending, ((1, 2), m, "verify")]
    assert [own.state.length(0, at) for at in (0, 1)] == [plain.state.length() for _ in (0, 1)]


def test_an_invalid_part_is_refused(tiny_checkpoint):
    session = create_tiny_models().open(3, Sampling())
    for part, why in (
        ({"layers": (0, 3)}, "no layers 0 to 3: it has 2"),
        ({"layers": (1, 1)}, "no layers 1 to 1"),
        ({"skip": [2]}, r"\(2, 'attention'\) is not a sublayer of the layers 0 to 1"),
        ({"skip": [(1, "norm")]}, "is not a sublayer"),
        ({"layers": (1, 2), "keep": True}, "needs a range of first layers"),
    ):
        with pytest.raises(MethodFault, match=why):
            session.partial(**part)
    hosted = open_target_session(
        load_decoder(tiny_checkpoint("gpt2"), name="target"), [5, 6], Sampling()
    )
    with pytest.raises(ValueError, match="not sublayers"):
        hosted.partial(skip=[(1, "mlp")])


def test_committed_text_that_is_rolled_back_with_a_part_is_reported():
    session = create_tiny_models().open(3, Sampling())
    session.prefill()
    session.partial(layers=(0, 1)).forward(
        session.pending_tokens(session.state.length()), session.state
    )
    session.state.rollback(0, 1)
    with pytest.raises(MethodFault, match="has lost rows of the committed text"):
        session.score(session.chain([]))


def test_a_part_waits_for_a_paused_forward_and_for_other_sequences():
    session = create_tiny_models().open(3, Sampling())
    session.prefill()
    part = session.partial(layers=(0, 1))
    half = session.begin_score(session.chain([4]), 1)
    with pytest.raises(MethodFault, match="before `begin_score`, or after its `end`"):
        part.forward(Tokens(torch.tensor([[4]])), session.state)
    half.end()
    with pytest.raises(MethodFault, match="one sequence at a time"):
        part.forward_batch([session.batch_input(Tokens(torch.tensor([[4]])), session.state)])


# ---- counted ------------------------------------------------------------------------------------


def share_of_weights(target, layers, *, logits=True):
    """Count the share of the weights of the checkpoint's matrices and norms that a part reads."""
    weights = target.weights
    hidden, vocab = target.hidden_size, target.vocab_size
    layer = 4 * hidden * hidden + 3 * hidden * 704 + 2 * hidden
    end = vocab * hidden + hidden
    assert len(weights.layers) == 8
    return (layers * layer + logits * end) / (8 * layer + end)


def test_shares_and_equivalents_are_those_counted_by_hand(self_draft, tmp_path):
    target = load_decoder(resolve("embedded-7m").path, name="target")
    assert target.share() == 1
    assert target.share((0, 8)) == 1
    assert target.share((0, 3)) == pytest.approx(share_of_weights(target, 3))
    assert target.share((3, 8), logits=False) == pytest.approx(
        share_of_weights(target, 5, logits=False)
    )
    hidden, end = 256, 256 * 4096 + 256
    mlp, attention = 3 * hidden * 704 + hidden, 4 * hidden * hidden + hidden
    skip = frozenset({2, (3, "mlp"), (4, "attention")})
    left = 6 * (mlp + attention) + end
    assert target.share(skip=skip) == pytest.approx(left / (8 * (mlp + attention) + end))

    rows = [{"name": "vanilla"}, {"name": "mirror"}]
    rows += [{"name": "self-draft", "label": f"keep {k}", "params": {"exit": 3, "keep": k}}
             for k in (False, True)]  # fmt: skip
    config = RunConfig.model_validate(
        {"methods": rows, "plugins": [str(FILE)], "limit": 1, "max_new_tokens": 12,
         "isolation": "none", "allow_noise": True, "threads": 1}
    )  # fmt: skip
    plan, run_dir = execute.start_run(config, {}, tmp_path / "run", Silent())
    # Run everything in this process: a run with workers would start another one.
    run = RunDir.open(execute.measure_run(plan, run_dir, Silent(), only_pass=1).run_dir)
    part, head = share_of_weights(target, 3), share_of_weights(target, 0)
    records = list(run.records())
    for record in records:
        steps, kinds = record.steps, record.forwards.kinds
        targets = record.target_forwards
        assert targets == 1 + len(steps.levels)
        assert record.verdict.kind in ("reference", "identical")
        if record.label == "vanilla":
            assert record.target_equivalents == targets == record.n_tokens
            assert {kind.share for kind in kinds} == {1}
        if record.label == "mirror":
            early = sum(
                kinds[kind].layers == (0, 4) for kind in record.forwards.kind
            )  # halves: the output matrix is read twice
            assert early
            assert record.target_equivalents == pytest.approx(targets + early * head, abs=1e-5)
        if record.label.startswith("keep"):
            assert record.draft_forwards == sum(steps.levels) > 0
            work = targets + record.draft_forwards * part
            assert record.target_equivalents == pytest.approx(work, abs=1e-5)
            assert record.ns.draft > 0
            assert {kind.role for kind in kinds if kind.layers == (0, 3)} >= {"draft"}
    summary = summarise(records, run.manifest)
    found = {row.label: row for row in summary.rows}
    assert found["vanilla"].work == 1
    own = [record for record in records if record.label == "keep False"]
    work = sum(r.target_equivalents for r in own) / sum(r.n_tokens for r in own)
    assert found["keep False"].work == pytest.approx(work)
    printed = run_text(summary, Facts.from_manifest(run.manifest))
    assert "accepted work tok/s" in " ".join(printed.split())
    assert f" {work:.2f} " in printed
    assert " work: target forwards per token; a partial" in printed


def test_a_part_costs_its_share_of_the_target(self_draft):
    session = create_tiny_models().open(3, Sampling())
    part = session.partial(layers=(0, 1))
    assert 0 < part.portion < 1
    assert session.draft_cost(part, 3) == pytest.approx(part.portion * session.verify_cost(3))
    assert session.draft_cost(session.draft()) == nominal_cost("draft", 1)
    assert session.verify_cost(1) == nominal_cost("target", 1) != nominal_cost("draft", 1)

"""Heads without state: their input, storage, metering and drafting."""

import json

import pytest
import torch
from torch import nn

from specbench_cli.engine.drafting.template import fill_from, tree_of_choices, tree_of_widths
from specbench_cli.engine.models.artifact import ArtifactSpec
from specbench_cli.engine.models.head import NORMED, FeatureHead
from specbench_cli.engine.models.load import load_decoder
from specbench_cli.engine.models.meter import Meter, MeteredHead
from specbench_cli.engine.types import Draft
from specbench_cli.engine.verify.sampling import Sampling
from specbench_cli.errors import EnvironmentFault, MethodFault

V = 5


class Lines(FeatureHead):
    """Head with one linear map per level."""

    kind = "lines"

    def __init__(self, target, levels=3):
        super().__init__(target, levels=levels)
        self.maps = nn.Parameter(torch.randn(levels, self.width, self.width))

    def forward(self, rows):
        return self.target.unembed(rows @ self.maps)


class Other(Lines):
    kind = "other"


@pytest.fixture
def table(random_table):
    return random_table(V, seed=4)


@pytest.fixture(scope="module")
def target(tiny_checkpoint):
    return load_decoder(tiny_checkpoint("llama"), name="target")


def open_capturing(open_session, table, **rest):
    session = open_session(table, prompt=(3, 1, 4), **rest)
    session.reserve(8)
    session.capture_layers((NORMED,))
    return session


# ---- what it reads ------------------------------------------------------------------------------


def test_after_prefill_it_reads_the_features_of_the_prompts_last_token(open_session, table):
    session = open_capturing(open_session, table)
    session.prefill()
    assert session.features().equal(table[1, 4][None])


def test_after_a_tree_it_reads_the_features_that_chose_the_last_token(open_session, table):
    session = open_capturing(open_session, table)
    session.prefill()
    root = session.tokens()[-1]
    right = int(table[4, root].argmax())
    wrong = (right + 1) % V
    draft = Draft(torch.tensor([wrong, right]), (-1, -1))
    session.commit(session.verify(draft, session.score(draft)))
    assert session.tokens()[-2] == right
    assert session.features().equal(table[root, right][None])
    assert session.features().equal(table[root, right][None])  # any number of times
    plain = session.chain(())
    session.commit(session.verify(plain, session.score(plain)))
    before, last = session.tokens()[-3:-1]
    assert session.features().equal(table[before, last][None])


def test_features_are_kept_only_if_requested(open_session, table):
    session = open_session(table, prompt=(3, 1, 4))
    session.prefill()
    with pytest.raises(MethodFault, match=r"session\.capture_layers"):
        session.features()
    session = open_capturing(open_session, table)
    with pytest.raises(MethodFault, match="before the prefill"):
        session.features()


def test_unread_features_are_dropped_with_an_error(open_session, table):
    session = open_capturing(open_session, table)
    session.prefill()
    session.features()
    with pytest.raises(MethodFault, match="were dropped"):
        session.pending_features(0)


def test_with_a_stateful_head_all_features_are_kept(open_session, table):
    session = open_capturing(open_session, table)
    session.prefill()
    assert session.pending_features(0).rows.shape[1] == 3
    session.features()
    for _ in range(2):
        plain = session.chain(())
        session.commit(session.verify(plain, session.score(plain)))
        session.features()
    assert session.pending_features(3).rows.shape[1] == 2


# ---- how it is kept -----------------------------------------------------------------------------


def test_a_saved_head_can_be_loaded(target, tmp_path):
    head = Lines.random({"target": target}, seed=1)
    longer = Lines(target, levels=4).ready()
    for number, each in enumerate((head, longer)):
        each.save(tmp_path / str(number), steps=7)
        again = Lines.load(tmp_path / str(number), {"target": target})
        assert torch.equal(again.maps, each.maps)
        assert again.sizes == each.sizes
    facts = json.loads((tmp_path / "1" / "config.json").read_text())
    assert facts["sizes"] == {"levels": 4}
    assert facts["specbench"]["kind"] == "lines"
    assert facts["specbench"]["steps"] == 7
    assert len(facts["specbench"]["target_sha256"]) == 64
    assert head.weight_bytes == 3 * 64 * 64 * 4


def test_random_heads_differ_by_seed_and_leave_torchs_generator_unchanged(target):
    torch.manual_seed(5)
    first, again, other = (Lines.random({"target": target}, seed=seed) for seed in (1, 1, 2))
    left = torch.rand(3)
    torch.manual_seed(5)
    assert torch.equal(left, torch.rand(3))
    assert torch.equal(first.maps, again.maps)
    assert not torch.equal(first.maps, other.maps)
    assert not first.maps.requires_grad and not first.training


def spoilt(folder, **facts):
    config = json.loads((folder / "config.json").read_text())
    config["specbench"] |= facts.pop("specbench", {})
    (folder / "config.json").write_text(json.dumps(config | facts))


@pytest.mark.parametrize(
    ("spoil", "message"),
    [
        (lambda f: (f / "config.json").unlink(), "no config.json"),
        (
            lambda f: spoilt(f, specbench={"kind": "eagle"}),
            "a head of kind eagle, the method needs lines",
        ),
        (lambda f: spoilt(f, specbench={"target_sha256": "ab"}), "trained for a target"),
        (lambda f: spoilt(f, sizes={"levels": 2}), "size mismatch"),
        (lambda f: spoilt(f, sizes={"depth": 2}), "depth"),
        (lambda f: spoilt(f, sizes={"levels": 4000}), "levels is 4000; a head has 1 to 64"),
        (lambda f: spoilt(f, sizes={"levels": True}), "levels is True"),
        (lambda f: spoilt(f, sizes={"levels": 7}), "more than twice the parameters of its weights"),
        (lambda f: spoilt(f, sizes=[3]), "has no attribute"),
        (lambda f: (f / "model.safetensors").unlink(), "lacks model.safetensors"),
    ],
)
def test_an_invalid_folder_is_refused_with_the_reason(target, tmp_path, spoil, message):
    Lines.random({"target": target}).save(tmp_path / "head")
    spoil(tmp_path / "head")
    with pytest.raises(EnvironmentFault, match=message) as fault:
        Lines.load(tmp_path / "head", {"target": target})
    assert fault.value.hint


def test_one_of_another_kind_is_refused(target, tmp_path):
    Other.random({"target": target}).save(tmp_path)
    with pytest.raises(EnvironmentFault, match="of kind other, the method needs lines"):
        Lines.load(tmp_path, {"target": target})


# ---- how it is metered --------------------------------------------------------------------------


def test_every_call_is_a_draft_forward(target):
    meter, head = Meter(torch.device("cpu")), Lines.random({"target": target})
    metered = MeteredHead(head, meter)
    rows = torch.randn(2, 64)
    assert torch.equal(metered(rows), head(rows))
    assert torch.equal(metered.forward(rows[:1]), head(rows[:1]))
    assert (metered.name, metered.captured_layers, metered.sizes) == (
        "lines",
        (NORMED,),
        {"levels": 3},
    )
    seen = [(f.model, f.role, f.batch, f.n_tokens, f.layers) for f in meter.forwards]
    assert seen == [("lines", "draft", 1, 2, (0, 1)), ("lines", "draft", 1, 1, (0, 1))]
    assert all(f.t0_ns <= f.t1_ns for f in meter.forwards)


def test_a_batched_call_records_the_sequences_it_read(target):
    meter = Meter(torch.device("cpu"))
    MeteredHead(Lines.random({"target": target}), meter, place=2)(torch.randn(1, 64))
    assert meter.forwards[0].rows == {2: 1}


def test_a_session_hands_it_out_behind_its_meter(open_session, table):
    session = open_session(table, table, prompt=(3, 1, 4))
    head = session.artifact(ArtifactSpec(Lines))
    head(torch.randn(1, V, dtype=torch.float64))
    assert [f.model for f in session.harness.meter.forwards] == ["lines"]


# ---- what is drafted from it --------------------------------------------------------------------


def test_a_template_is_filled_with_the_best_tokens_of_each_level(open_session, table):
    session = open_capturing(open_session, table)
    session.prefill()
    logits = torch.tensor([[0.0, 4, 3, 2, 1], [5, 1, 2, 3, 4.0]])
    draft = fill_from(tree_of_choices([(0,), (1,), (0, 0), (0, 1), (1, 0)]), logits, session)
    assert draft.tokens.tolist() == [1, 2, 0, 4, 0]
    assert draft.parents == (-1, -1, 0, 0, 1)


@pytest.mark.parametrize("rule", ["greedy", "coupled", "rejection"])
def test_the_ranking_uses_the_sessions_decision_scores(open_session, table, rule):
    sampling = Sampling() if rule == "greedy" else Sampling(rule, 0.7, seed=3)
    session = open_capturing(open_session, table, sampling=sampling)
    session.prefill()
    logits = table[0, :2].float()
    draft = fill_from(tree_of_widths((2, 2)), logits, session)
    best = [session.candidates(logits[k : k + 1], 2, ahead=k)[0][0].tolist() for k in range(2)]
    assert draft.tokens.tolist() == [*best[0], *best[1], *best[1]]


@pytest.mark.parametrize(
    ("rows", "budget", "nodes"), [(3, 8, 2 + 4 + 8), (2, 8, 2 + 4), (3, 3, 2), (3, 2, 0)]
)
def test_the_depth_is_limited_by_rows_and_budget(open_session, table, rows, budget, nodes):
    session = open_capturing(open_session, table, budget=budget)
    session.prefill()
    assert fill_from(tree_of_widths((2, 2, 2)), table[0, :rows], session).nodes == nodes


def test_the_width_is_limited_by_the_vocabulary(open_session, table):
    session = open_capturing(open_session, table)
    session.prefill()
    assert fill_from(tree_of_widths((V + 2,)), table[0, :1], session).nodes == V

"""SpecDec++: its draft lengths, the input of its head, and that its head changes no output."""

import json

import pytest
import torch
from pydantic import ValidationError
from safetensors.torch import save_file
from torch import nn

from methods.specdecpp.head import AcceptanceHead
from methods.specdecpp.method import SpecDecPP, SpecDecPPParams
from methods.sps import Sps, SpsParams
from specbench_cli.audit.cases import Case
from specbench_cli.audit.models.table import make_table_pair
from specbench_cli.engine.drafting.length_params import RULES
from specbench_cli.engine.models.load import sha256_of
from specbench_cli.engine.verify.sampling import Sampling
from specbench_cli.errors import EnvironmentFault
from tests.methods.exact import distance_from_target

GREEDY = Sampling()
COUPLED = Sampling("coupled", 0.8, top_k=24, top_p=0.95, seed=3)
REJECTION = Sampling("rejection", 0.8, top_k=24, seed=3)
RULED = pytest.mark.parametrize("sampling", [GREEDY, COUPLED, REJECTION], ids=lambda s: s.rule)


class Says(AcceptanceHead):
    """A head that predicts the same chance of every token."""

    def __init__(self, chance):
        self.chance = chance

    def __call__(self, rows):
        return torch.full((len(rows),), self.chance)


def run(session, head=None, **params):
    """The steps of a decoding with a head; None: a random one."""
    if head is not None:
        session._workspace.load_artifact = lambda wanted: head
    return list(SpecDecPP(SpecDecPPParams(**params)).generate(session))


@pytest.fixture
def open_with(open_session):
    """A session whose trained modules are its own."""

    def make(prompt, sampling, **rest):
        session = open_session(prompt, sampling, **rest)
        session._workspace._artifacts = {}
        return session

    return make


# ---- how far it drafts --------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("chance", "params", "length"),
    [
        (0.9, {"threshold": 0.3}, 5),
        (0.9, {"threshold": 0.3, "max": 3}, 3),
        (0.9, {"threshold": 0.3, "min": 7}, 7),
        (0.0, {"threshold": 1.0}, 20),
        (0.99, {"threshold": 0.0}, 2),
        (1.0, {"threshold": 0.0}, 20),
        (0.5, {"threshold": 0.3, "min": 1}, 2),
    ],
)
@RULED
def test_a_constant_head_drafts_a_fixed_length(open_with, sampling, chance, params, length):
    step = run(open_with(5, sampling, budget=24), Says(chance), **params)[0]
    assert step.draft.levels == length


@RULED
def test_a_random_head_stops_at_different_lengths(open_with, sampling):
    levels = {
        step.draft.levels
        for prompt in (0, 9, 18)
        for step in run(open_with(prompt, sampling), threshold=0.8)
        if step.draft.levels < 20
    }
    assert len(levels) > 4


def test_the_head_reads_the_drafts_hidden_states_except_the_newest(open_with, family):
    read = []

    class Listens(Says):
        def __call__(self, rows):
            read.append(rows)
            return super().__call__(rows)

    session = open_with(7, GREEDY)
    step = run(session, Listens(0.9), threshold=0.3)[0]
    text = [*session.tokens()[: len(session.requests[0].ids) + 1], *step.draft.tokens.tolist()]
    module = family.modules["near"].model
    truth = module(torch.tensor([text])).last_hidden_state[0, -5:-1]
    draft = family.decoders["near"]
    ours = torch.cat([draft.norm(rows) for rows in read[:4]])
    torch.testing.assert_close(ours, truth, atol=1e-4, rtol=1e-4)


def test_an_eos_ends_the_draft(open_with):
    session = open_with(5, GREEDY)
    ids = run(session, Says(1.0))[0].draft.tokens.tolist()
    at = next(i for i in range(2, len(ids)) if ids[i] not in ids[:i])
    ended = run(open_with(5, GREEDY, eos=(ids[at],)), Says(1.0))[0].draft
    assert ended.tokens.tolist() == ids[: at + 1]


def test_it_drafts_as_sps_with_the_same_head(open_with):
    for prompt in (3, 11, 20):
        own = run(open_with(prompt, COUPLED), threshold=0.8, min=1)
        method = Sps(SpsParams(length="acceptance-head", threshold=0.8))
        theirs = method.generate(open_with(prompt, COUPLED))
        assert [s.outcome for s in own] == [s.outcome for s in theirs]


# ---- no rule bends what comes out ---------------------------------------------------------------


@pytest.mark.parametrize("rule", RULES)
@pytest.mark.parametrize("sampling", [GREEDY, COUPLED], ids=lambda s: s.rule)
def test_every_rule_keeps_plain_decodings_output(open_with, clear_prompts, plain, sampling, rule):
    method = Sps(SpsParams(length=rule))
    for prompt in clear_prompts(sampling, 3):
        session = open_with(prompt, sampling)
        list(method.generate(session))
        assert session.output() == plain(prompt, sampling).ids


METHODS = [
    SpecDecPP(SpecDecPPParams(threshold=0.5, min=1, max=3)),
    SpecDecPP(SpecDecPPParams(threshold=0.7, min=2, max=3)),
    Sps(SpsParams(length="acceptance-head", threshold=0.5, max=3)),
    Sps(SpsParams(length="confidence", max=3)),
    Sps(SpsParams(length="confidence", threshold=0.6, max=3)),
    Sps(SpsParams(length="entropy", threshold=0.5, max=3)),
    Sps(SpsParams(length="heuristic", max=3)),
]


@pytest.mark.parametrize("method", METHODS, ids=lambda m: f"{m.name} {m.params}")
def test_the_distribution_is_the_targets_for_any_stopping_rule(method):
    sampling = Sampling("rejection", 1.0, top_k=2)
    case = Case("near", make_table_pair("near"), sampling, budget=5, length=3)
    workspace, lengths = case.create_workspace(), set()
    workspace.load_artifact = lambda wanted: wanted.kind.random(workspace.decoders)

    def seen(step):
        lengths.add(step.draft.levels)

    assert distance_from_target(method, case, seen, workspace=workspace) < 1e-9
    assert len(lengths) > 1


# ---- the head's files ---------------------------------------------------------------------------


class Block(nn.Module):
    def __init__(self, width):
        super().__init__()
        self.linear = nn.Linear(width, width)

    def forward(self, x):
        return x + nn.functional.silu(self.linear(x))


def stored(folder, blocks, last, tensors=None, **config):
    """A head as the authors store it: a sequence of blocks, some of them maybe one object."""
    folder.mkdir(exist_ok=True)
    module = nn.Module()
    module.model = nn.Sequential(*blocks, last)
    held = {k: v.clone() for k, v in (tensors or module.state_dict()).items()}
    save_file(held, folder / "model.safetensors")
    sizes = {"hidden_size": last.in_features, "num_layers": len(blocks)}
    (folder / "config.json").write_text(json.dumps(sizes | config))
    return module.model


@pytest.fixture
def decoders(family):
    return {"target": family.decoders["target"], "draft": family.decoders["near"]}


def predicted(head, rows):
    """Return the acceptance probabilities that a stored head predicts for normalized rows."""
    return head(rows).softmax(-1)[:, 1]


@pytest.mark.parametrize("depth", [0, 1, 3])
def test_an_untied_head_computes_what_its_module_does(tmp_path, decoders, depth):
    module = stored(tmp_path, [Block(32) for _ in range(depth)], nn.Linear(32, 2))
    rows = torch.randn(4, 32)
    head = AcceptanceHead.load(tmp_path, decoders)
    expected = predicted(module, decoders["draft"].norm(rows.clone()))
    torch.testing.assert_close(head(rows.clone()), expected)
    assert head.weight_bytes == 4 * (depth * 33 * 32 + 33)


@pytest.mark.parametrize("copies", [1, 3], ids=["stored once", "stored thrice"])
def test_a_tied_head_is_one_block_applied_three_times(tmp_path, decoders, copies):
    block, last = Block(32), nn.Linear(32, 2)
    names = nn.Sequential(*[block] * copies).state_dict()
    tensors = {f"model.{name}": value for name, value in names.items()}
    tensors |= {f"model.3.{name}": value for name, value in last.state_dict().items()}
    stored(tmp_path, [block] * 3, last, tensors)
    rows = torch.randn(4, 32)
    x = decoders["draft"].norm(rows.clone())
    expected = predicted(last, block(block(block(x))))
    torch.testing.assert_close(AcceptanceHead.load(tmp_path, decoders)(rows.clone()), expected)


HEAD = {
    "model.0.linear.weight": torch.zeros(32, 32),
    "model.0.linear.bias": torch.zeros(32),
    "model.1.weight": torch.zeros(2, 32),
    "model.1.bias": torch.zeros(2),
}


@pytest.mark.parametrize(
    ("spoil", "message"),
    [
        (lambda f: (f / "config.json").unlink(), "config.json is missing"),
        (lambda f: (f / "config.json").write_text("{}"), "hidden_size or num_layers is missing"),
        (lambda f: stored(f, [Block(16)], nn.Linear(16, 2)), "is for hidden size 16"),
        (
            lambda f: stored(f, [Block(32)], nn.Linear(32, 2), specbench={"draft_sha256": "ab"}),
            "trained for another draft",
        ),
        (
            lambda f: stored(f, [Block(32)], nn.Linear(32, 2), specbench={"target_sha256": "ab"}),
            "trained for another target",
        ),
        (
            lambda f: stored(f, [Block(32)], nn.Linear(32, 2), num_layers=3),
            "missing tensor",
        ),
        (
            lambda f: stored(f, [Block(32)], nn.Linear(32, 2), num_layers=2**31),
            "num_layers is 2147483648; it must be from 0 to 64",
        ),
        (
            lambda f: stored(f, [Block(32)], nn.Linear(32, 2), {**HEAD, "scale": torch.ones(1)}),
            "holds the tensor scale, which nothing reads",
        ),
        (lambda f: (f / "model.safetensors").unlink(), "lacks model.safetensors"),
    ],
)
def test_a_head_that_does_not_fit_says_why(tmp_path, decoders, spoil, message):
    stored(tmp_path, [Block(32)], nn.Linear(32, 2))
    spoil(tmp_path)
    with pytest.raises(EnvironmentFault, match=message):
        AcceptanceHead.load(tmp_path, decoders)


def test_a_head_of_these_models_is_taken(tmp_path, decoders):
    facts = {f"{role}_sha256": sha256_of(decoder) for role, decoder in decoders.items()}
    stored(tmp_path, [Block(32)], nn.Linear(32, 2), specbench={"kind": "acceptance", **facts})
    AcceptanceHead.load(tmp_path, decoders)


@pytest.mark.parametrize("wrong", [{"threshold": 1.5}, {"min": 0}, {"max": 0}, {"length": 5}])
def test_parameters_out_of_bounds_are_refused(wrong):
    with pytest.raises(ValidationError):
        SpecDecPPParams(**wrong)

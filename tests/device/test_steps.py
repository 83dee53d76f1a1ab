"""Whole steps of every method on a device that is not there: where tensors are, and who waits.

What a step must wait for is in `CASES`; docs/explanations/devices.md says why.
"""

import pytest
import torch

from specbench_cli import registry
from specbench_cli.engine import session_view
from specbench_cli.engine.batch import Batch
from specbench_cli.engine.request import Request
from specbench_cli.engine.sequence import StopRule
from specbench_cli.engine.verify.random import SeededRandom
from specbench_cli.engine.verify.sampling import Sampling

CPU, FAR = torch.device("cpu"), torch.device("cuda", 0)
GROWN = {"shape": "dynamic", "width": 3, "depth": 4, "nodes": 8}
RULES = (
    Sampling(),
    Sampling("coupled", 0.8, top_k=24, top_p=0.95, seed=3),
    Sampling("rejection", 0.8, seed=3),
)


def verification(told, draws):
    """One wait; where tokens of a tree are drawn, one for each draw and test beside those for its
    ids, for the last token, and for the inspection of distributions that `session.branch` gave."""
    draft = told.step.draft
    if not draws or draft.parents is None:
        return 1
    return 2 + told.draws if draft.q is None else 4 + told.tests


def nothing(told, draws):
    return 0


def each_token(told, draws):
    """The rule looks at every token before the next is drafted."""
    return told.step.draft.nodes


def once(told, draws):
    """The best of all levels come at once."""
    return min(1, told.step.draft.nodes)


def each_level(told, draws):
    """A level's children are known before the next is drafted."""
    return told.step.draft.levels


def each_forward(told, draws):
    """What comes of a forward decides what n-grams on the host propose next."""
    return sum(forward.role == "draft" for forward in told.step.forwards)


def each_draw(told, draws):
    """As `each_forward`; a draw each, and twice for the last of a forward and its probability."""
    return told.draws - 1 + 2 * each_forward(told, draws) if draws else each_forward(told, draws)


def distributions(told, draws):
    """A level's children, whose distributions the host looks up; and the distributions of committed
    tokens."""
    return told.step.draft.levels + 1


def choices(told, draws):
    """The window's new row, where the output has not ended."""
    return told.left >= 0


def each_node(told, draws):
    """Which node is drawn is told before the next is; of a level, once how many there can be."""
    return told.step.draft.nodes + told.step.draft.levels if draws else told.step.draft.levels


def each_fed(told, draws):
    """What a node's token is decides which slot is filled next; chosen ones come by the forward."""
    return told.step.draft.nodes if draws else each_forward(told, draws)


def exits(told, draws):
    """Whether the target can go on from what drafted, and what all exits say."""
    return min(1, each_forward(told, draws)) + 1


def sure_exits(told, draws):
    """The exit's confidence too."""
    return each_forward(told, draws) + exits(told, draws)


def each_graded(told, draws):
    """Any token may end the span; and the grade of one that is judged."""
    return told.step.draft.nodes + ("grade" in told.step.extra)


def each_drafted(told, draws):
    """Any token may end the paragraph."""
    return told.step.draft.nodes


def looks(told, draws):
    """What a layer is trusted with, at each; and whether its token is a candidate, of trusted ones.
    (With every row in all layers, a forward goes from look to look.)"""
    forwards = [f for f in told.step.forwards if f.model == "target"]
    depth = max(f.layers[1] for f in forwards)
    halts = sum(f.role == "verify" and f.layers[1] < depth for f in forwards)
    return halts + sum(f.layers in ((0, 0), (depth, depth)) for f in forwards)


def looked_ahead(told, draws):
    """All that was looked ahead at comes at once."""
    return told.step.extra["lookaheads"]


def window(told, draws):
    """The drafter's ids."""
    return 1


def outcomes(told, draws):
    """The drafter's ids of the next window, and the outcomes that windows are prepared for."""
    return (told.left > 0) + (told.room > 1)


CASES = {
    "vanilla": [({}, nothing)],
    "sps": [
        ({"length": 3}, nothing),
        ({"length": "heuristic"}, nothing),
        ({"length": "confidence", "max": 3}, each_token),
        ({"length": "entropy", "max": 3}, each_token),
        ({"length": "acceptance-head", "max": 3}, each_token),
        ({"length": "oracle", "max": 3}, each_token),
        ({"length": 3, "accept": "threshold"}, nothing),
        ({"length": 3, "accept": "typical"}, nothing),
        ({"length": 3, "accept": "random", "rate": 0.5}, nothing),
    ],
    "specdec++": [({"max": 3}, each_token)],
    "eqspec": [({"length": 3}, nothing), ({"length": "smartspec", "max": 3}, nothing)],
    "exspec": [({"length": 3}, nothing), ({"length": "synergy", "max": 3}, nothing)],
    "pld": [({"length": 4, "ngram": 1}, nothing)],
    "sam": [
        ({}, nothing),
        ({"beside": "draft", "threshold": 2}, nothing),
        ({"beside": "eagle", "threshold": 2}, nothing),
    ],
    "rest": [({"shortest": 1, "nodes": 12}, nothing)],
    "token-recycling": [({"nodes": 24, "depth": 4}, nothing)],
    "lookahead": [({"ngram": 2, "window": 40}, choices)],
    "stand": [({"nodes": 12, "depth": 3}, distributions)],
    "suffix": [({}, nothing), ({"shape": "tree"}, nothing)],
    "sps-tree": [
        ({"widths": (2, 2, 1)}, nothing),
        ({"widths": (2, 2, 1), "draw_mode": "independent"}, nothing),
        ({"widths": (2, 2, 1), "draw_mode": "deterministic"}, nothing),
        (GROWN, once),
    ],
    "rsd-c": [({"depth": 2}, nothing), ({"widths": (3, 1, 1)}, nothing)],
    "rsd-s": [({"width": 2, "depth": 2}, each_node)],
    "sequoia": [({"profile": 2, "width": 3, "nodes": 6, "depth": 3}, nothing)],
    "layerskip": [({"length": 3}, once)],
    "del": [({"length": 3}, sure_exits), ({"length": 3, "stop": False}, exits)],
    "swift": [({"depth": 3, "width": 3, "least": 0.0}, each_forward)],
    "dyspec": [
        ({"nodes": 5}, each_fed),
        ({"nodes": 6, "growth": "threshold", "threshold": 0.1}, each_fed),
    ],
    "staged": [
        ({"lookahead": 3}, each_forward),
        ({"lookahead": 3, "draw_mode": "without_replacement"}, each_draw),
    ],
    "eagle": [({"depth": 3}, nothing), ({"shape": "chain", "depth": 3}, nothing)],
    "eagle2": [({"depth": 4, "width": 3}, once)],
    "eagle3": [({"depth": 4, "width": 3}, once)],
    "medusa": [({"nodes": 8}, once)],
    "hydra": [({"nodes": 8, "width": 3}, nothing), ({"nodes": 8, "children": "drawn"}, nothing)],
    "hydra++": [({"nodes": 8, "width": 3}, nothing)],
    "clover": [({"nodes": 8, "depth": 3}, each_level)],
    "pard": [({"length": 3}, nothing)],
    "p-eagle": [({"length": 3}, nothing)],
    "space": [({"length": 2}, nothing)],
    "tli": [({"length": 3}, nothing)],
    "osd": [({"length": 3}, nothing)],
    "s2d": [({"length": 3}, nothing)],
    "uag": [({"length": 3}, once)],
    "omnidraft": [({"length": 3}, each_token)],
    "dflash": [({"length": 3}, nothing), ({}, nothing)],
    "hidden-transfer": [({"nodes": 6}, once)],
    "chimera": [({"depth": 3, "nodes": 8}, nothing)],
    "falcon": [({"nodes": 12}, nothing)],
    "mtp": [({}, nothing), ({"length": "confidence", "max": 3}, each_token)],
    "typical": [({"length": 3}, nothing)],
    "lenient": [({"length": 3}, nothing)],
    "judge": [({"length": 3}, nothing)],
    "cdsl": [({"length": 3}, nothing), ({"length": 3, "words": ("a",)}, looked_ahead)],
    "specee": [
        ({"fill": "copy"}, looks),
        ({"fill": "copy", "gate": "random", "rate": 0.5}, looks),
        ({"threshold": 1.0}, looks),
    ],
    "random-accept": [({"length": 3, "rate": 0.5}, nothing)],
    "draft-alone": [({}, nothing)],
    "specreason": [
        ({"cap": 4}, each_graded),
        ({"cap": 4, "grade": "digit", "length": 2}, each_graded),
        ({"cap": 4, "rate": 0.5}, each_graded),
    ],
    "atts": [({"cap": 4, "length": 2}, each_graded), ({"cap": 4, "rate": 0.5}, each_graded)],
    "speculative-thinking": [
        ({"cap": 4}, each_drafted),
        ({"cap": 4, "writer": "target", "length": 2}, each_drafted),
    ],
    "pearl": [({}, window)],
    "mirror": [({"length": 3}, outcomes)],
    "ssd": [({"length": 3}, outcomes)],
}
"""By method: parameters, and what a step waits for beside its verification."""

CLOCKS = {"pearl": (1, 1), "mirror": (3, 1), "ssd": (2, 1)}
"""How often a step asks a drafter for the times of its forwards, which waits for its stream: once
an order; in a step behind which there is no room for a window."""


BUDGETS = {"stand": 48, "pld": 8, "lookahead": 8}
"""Tokens of the output, of methods that draft only what came again in it; of others six."""


EVERY_RULE = ("vanilla", "sps", "pld", "sps-tree", "eagle2", "mirror")
"""Methods of every kind of draft, which run under every rule."""


def cases(rules):
    """Each once where nothing is drawn and once where all is. Under the coupled rule, whose noise
    is the engine's and whose waits are those of greedy decoding, runs every second case in place of
    the latter."""
    turn = 0
    for name, rows in CASES.items():
        for at, (params, waits) in enumerate(rows):
            turn += 1
            chosen = rules if at == 0 and name in EVERY_RULE else (rules[turn % 2], *rules[2:])
            for sampling in chosen:
                words = "-".join(map(str, (name, *params.values(), sampling.rule)))
                yield pytest.param(name, params, waits, sampling, id=words.replace(" ", ""))


def test_every_method_has_its_case():
    assert set(CASES) == {
        name for name, entry in registry.built_in_methods().items() if not entry.peer
    }


def told_alike(here, there):
    """Whether two decodes took the same steps to the same output."""
    (output, steps), (other, others) = here, there
    pairs = [
        [(each.step.draft.parents, each.step.outcome) for each in run] for run in (steps, others)
    ]
    return output == other and pairs[0] == pairs[1]


@pytest.mark.parametrize(("name", "params", "waits", "sampling"), [*cases(RULES)])
def test_a_step_is_the_cpus_and_waits_as_often_as_it_must(far, name, params, waits, sampling):
    check(far, name, params, waits, sampling)


def tossed(params):
    """Whether chance decides, whatever the rule: a GPU's is its own."""
    return "rate" in params


@pytest.mark.gpu
@pytest.mark.parametrize(
    ("name", "params", "waits", "sampling"),
    [case for case in cases(RULES[:2]) if not tossed(case.values[1])],
)
def test_a_gpu_takes_the_cpus_steps_too(real, name, params, waits, sampling):
    check(real, name, params, waits, sampling)


RECORDED = ("vanilla", "sps", "eagle2", "eagle3", "sps-tree", "staged", "pld", "pearl")


@pytest.mark.parametrize("name", RECORDED)
def test_replayed_forwards_are_the_cpus_steps_and_wait_no_more(far, name):
    check_recorded(far, name)


@pytest.mark.gpu
@pytest.mark.parametrize("name", [name for name in CASES if not tossed(CASES[name][0][0])])
def test_graphs_on_a_gpu_are_the_cpus_steps_and_wait_no_more(real, name):
    check_recorded(real, name)


def check_recorded(far, name):
    budget, params = BUDGETS.get(name, 8), CASES[name][0][0]
    there = far.decode(name, params, budget=budget, recorded=True)
    assert told_alike(far.decode(name, params, device=CPU, budget=budget), there)
    launched = far.decode(name, params, budget=budget)
    assert [len(told.waits) for told in there[1]] == [len(told.waits) for told in launched[1]]
    recorded = far.workspace(FAR, recorded=True).recorded
    far.decode(name, params, budget=budget, recorded=True)
    assert far.workspace(FAR, recorded=True).recorded == recorded


@pytest.mark.parametrize("threshold", [0.0, 0.05, 2.0])
def test_a_draft_of_nested_sizes_waits_once_for_each_token(far, places, threshold):
    """Whether its first layers are sure of it decides what runs next."""
    deep = {**places, "draft": places["target"]}
    params = {"length": 3, "threshold": threshold}
    there = far.decode("s2d", params, budget=8, places=deep)
    assert told_alike(far.decode("s2d", params, device=CPU, budget=8, places=deep), there)
    for told in there[1][1:]:
        assert len(told.waits) == verification(told, draws=False) + told.step.draft.nodes


def check(far, name, params, waits, sampling):
    budget = BUDGETS.get(name, 6)
    there = far.decode(name, params, sampling, budget=budget)
    assert told_alike(far.decode(name, params, sampling, device=CPU, budget=budget), there)
    for told in there[1][1:]:  # the first one has prefill in it
        due = verification(told, sampling.draws) + waits(told, sampling.draws)
        assert len(told.waits) == due, (told.step.draft, told.waits)
        assert told.clocks == CLOCKS.get(name, (0, 0))[told.room < 2]
    assert any(told.step.draft.nodes for told in there[1]) == registry.load(name).proposes


@pytest.mark.parametrize("sampling", RULES, ids=lambda sampling: sampling.rule)
@pytest.mark.parametrize(
    ("name", "params"),
    [("vanilla", {}), ("sps", {"length": 3}), ("eagle2", {"depth": 3, "width": 3}), ("mirror", {})],
)
def test_half_precision_takes_the_same_way(far, name, params, sampling):
    here, there = (
        far.decode(name, params, sampling, dtype=torch.bfloat16, device=device, budget=6)
        for device in (CPU, FAR)
    )
    assert told_alike(here, there)


@pytest.mark.parametrize("family", ["mistral", "qwen2", "qwen3", "gemma2"])
def test_models_of_every_kind_work_there(far, tiny_checkpoint, family):
    places = {"target": tiny_checkpoint(family), "draft": tiny_checkpoint(family, seed=1)}
    here, there = (
        far.decode("sps-tree", GROWN, device=device, budget=6, places=places)
        for device in (CPU, FAR)
    )
    assert told_alike(here, there)
    assert all(len(told.waits) == 2 for told in there[1][1:] if told.step.draft.nodes)


@pytest.mark.parametrize("name", ["sps", "eagle2"])
def test_transformers_own_module_takes_the_same_steps(far, name):
    here, there = (far.decode(name, device=device, budget=6, hosted=True) for device in (CPU, FAR))
    assert told_alike(here, there)


@pytest.mark.parametrize(("name", "params", "waits"), [("vanilla", {}, 1), ("sps-tree", GROWN, 2)])
def test_a_batch_waits_as_often_as_its_sequences(far, monkeypatch, name, params, waits):
    def chance(*key, **rest):
        return SeededRandom(*key[:-1], CPU, **rest)

    monkeypatch.setattr(session_view, "SeededRandom", chance)
    requests = [
        Request(f"far/{at}", 0, far.prompt[at:], StopRule(frozenset(), 4 + at)) for at in range(3)
    ]
    outputs = []
    for device in (CPU, FAR):
        workspace, method = far.workspace(device), registry.load(name)
        before = len(far.waited)
        with far.on(device):
            batch = Batch(workspace, requests, Sampling())
            steps = [*method(method.Params(**params)).generate_batch(batch)]
            outputs.append([list(each.output()) for each in batch.sessions])
    assert outputs[0] == outputs[1]
    drafted = sum(step.draft.nodes > 0 for step in steps)
    assert len(far.waited) - before == 3 + len(steps) + (waits - 1) * drafted


def test_a_recording_is_walked_with_one_wait_a_step(far):
    here, _ = far.decode("vanilla", device=CPU)
    output, steps = far.decode("eagle2", {"depth": 3}, recording=here)
    assert output == here
    assert {len(told.waits) for told in steps[1:] if told.step.draft.nodes} == {2}

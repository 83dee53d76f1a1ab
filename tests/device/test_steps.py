"""Complete steps of every method on a simulated device: where tensors are, and which steps wait.

`CASES` lists the waits that a step needs. docs/explanations/devices.md explains them.
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


def count_verification(trace, draws):
    """Count the waits of verification: one if no tokens are drawn.

    A drawn tree waits for each draw and test. It also waits for its token ids, for the last token
    and for the check of q.
    """
    draft = trace.step.draft
    if not draws or draft.parents is None:
        return 1
    return 2 + trace.draws if draft.q is None else 4 + trace.tests


def nothing(trace, draws):
    return 0


def each_token(trace, draws):
    """The rule looks at every token before the next is drafted."""
    return trace.step.draft.nodes


def one_wait(trace, draws):
    """The most likely tokens of all levels are read together."""
    return min(1, trace.step.draft.nodes)


def each_level(trace, draws):
    """The tokens of a level are read before the next level is drafted."""
    return trace.step.draft.levels


def each_forward(trace, draws):
    """The result of each draft forward decides which n-grams the host proposes next."""
    return sum(forward.role == "draft" for forward in trace.step.forwards)


def each_draw(trace, draws):
    """As `each_forward`. In addition each draw waits, and the last draw of a forward waits
    twice."""
    return trace.draws - 1 + 2 * each_forward(trace, draws) if draws else each_forward(trace, draws)


def distributions(trace, draws):
    """The tokens of each level, whose q the host looks up, and the distributions of committed
    tokens."""
    return trace.step.draft.levels + 1


def choices(trace, draws):
    """The new row of the window, if the output has not ended."""
    return trace.left >= 0


def each_node(trace, draws):
    """Each drawn node is read before the next draw. In each level the number of nodes is read
    once."""
    return trace.step.draft.nodes + trace.step.draft.levels if draws else trace.step.draft.levels


def each_fed(trace, draws):
    """A node's token decides which slot is filled next. Deterministic tokens are read per
    forward."""
    return trace.step.draft.nodes if draws else each_forward(trace, draws)


def exits(trace, draws):
    """Return the waits of a step with early exits: one for a draft, one for the exit logits."""
    return min(1, each_forward(trace, draws)) + 1


def sure_exits(trace, draws):
    """Return the waits of `exits`, and those for the confidence at the exit."""
    return each_forward(trace, draws) + exits(trace, draws)


def each_token_and_grade(trace, draws):
    """Any token may end the segment. The grade of a judged segment is read as well."""
    return trace.step.draft.nodes + ("grade" in trace.step.extra)


def each_drafted(trace, draws):
    """Any token may end the paragraph."""
    return trace.step.draft.nodes


def exit_checks(trace, draws):
    """The exit predictor of each layer, and whether its token is a candidate.

    If every layer has all rows, the check between two forwards of layers waits.
    """
    forwards = [f for f in trace.step.forwards if f.model == "target"]
    depth = max(f.layers[1] for f in forwards)
    halts = sum(f.role == "verify" and f.layers[1] < depth for f in forwards)
    return halts + sum(f.layers in ((0, 0), (depth, depth)) for f in forwards)


def each_look_ahead(trace, draws):
    """All tokens of a look-ahead are read together."""
    return trace.step.extra["lookaheads"]


def window(trace, draws):
    """The ids of the drafter's window."""
    return 1


def outcomes(trace, draws):
    """The ids of the drafter's next window, and the outcomes for which windows are prepared."""
    return (trace.left > 0) + (trace.room > 1)


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
        (GROWN, one_wait),
    ],
    "rsd-c": [({"depth": 2}, nothing), ({"widths": (3, 1, 1)}, nothing)],
    "rsd-s": [({"width": 2, "depth": 2}, each_node)],
    "sequoia": [({"profile": 2, "width": 3, "nodes": 6, "depth": 3}, nothing)],
    "layerskip": [({"length": 3}, one_wait)],
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
    "eagle2": [({"depth": 4, "width": 3}, one_wait)],
    "eagle3": [({"depth": 4, "width": 3}, one_wait)],
    "medusa": [({"nodes": 8}, one_wait)],
    "hydra": [({"nodes": 8, "width": 3}, nothing), ({"nodes": 8, "children": "drawn"}, nothing)],
    "hydra++": [({"nodes": 8, "width": 3}, nothing)],
    "clover": [({"nodes": 8, "depth": 3}, each_level)],
    "pard": [({"length": 3}, nothing)],
    "p-eagle": [({"length": 3}, nothing)],
    "space": [({"length": 2}, nothing)],
    "tli": [({"length": 3}, nothing)],
    "osd": [({"length": 3}, nothing)],
    "s2d": [({"length": 3}, nothing)],
    "uag": [({"length": 3}, one_wait)],
    "omnidraft": [({"length": 3}, each_token)],
    "dflash": [({"length": 3}, nothing), ({}, nothing)],
    "hidden-transfer": [({"nodes": 6}, one_wait)],
    "chimera": [({"depth": 3, "nodes": 8}, nothing)],
    "falcon": [({"nodes": 12}, nothing)],
    "mtp": [({}, nothing), ({"length": "confidence", "max": 3}, each_token)],
    "typical": [({"length": 3}, nothing)],
    "lenient": [({"length": 3}, nothing)],
    "judge": [({"length": 3}, nothing)],
    "cdsl": [({"length": 3}, nothing), ({"length": 3, "words": ("a",)}, each_look_ahead)],
    "specee": [
        ({"fill": "copy"}, exit_checks),
        ({"fill": "copy", "gate": "random", "rate": 0.5}, exit_checks),
        ({"threshold": 1.0}, exit_checks),
    ],
    "random-accept": [({"length": 3, "rate": 0.5}, nothing)],
    "draft-alone": [({}, nothing)],
    "specreason": [
        ({"cap": 4}, each_token_and_grade),
        ({"cap": 4, "grade": "digit", "length": 2}, each_token_and_grade),
        ({"cap": 4, "rate": 0.5}, each_token_and_grade),
    ],
    "atts": [
        ({"cap": 4, "length": 2}, each_token_and_grade),
        ({"cap": 4, "rate": 0.5}, each_token_and_grade),
    ],
    "speculative-thinking": [
        ({"cap": 4}, each_drafted),
        ({"cap": 4, "writer": "target", "length": 2}, each_drafted),
    ],
    "pearl": [({}, window)],
    "mirror": [({"length": 3}, outcomes)],
    "ssd": [({"length": 3}, outcomes)],
}
"""Parameters of each method, and the waits of a step besides verification."""

CLOCKS = {"pearl": (1, 1), "mirror": (3, 1), "ssd": (2, 1)}
"""How often a step reads the times of a drafter's forwards, which waits for its stream.

This happens once per order. The second number applies to a step without space for another window.
"""


BUDGETS = {"stand": 48, "pld": 8, "lookahead": 8}
"""Output lengths of methods that draft only repeated text. Others decode six tokens."""


EVERY_RULE = ("vanilla", "sps", "pld", "sps-tree", "eagle2", "mirror")
"""Methods of every kind of draft, which run under every rule."""


def cases(rules):
    """List each case once for greedy decoding and once for a sampling rule.

    The coupled rule waits like greedy decoding. Every second case uses it instead of the rule with
    draws.
    """
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


def same_decode(here, there):
    """Return True if two decodes made the same steps and the same output."""
    (output, steps), (other, others) = here, there
    pairs = [
        [(each.step.draft.parents, each.step.outcome) for each in run] for run in (steps, others)
    ]
    return output == other and pairs[0] == pairs[1]


@pytest.mark.parametrize(("name", "params", "waits", "sampling"), [*cases(RULES)])
def test_a_step_equals_the_cpus_and_waits_as_often_as_needed(far, name, params, waits, sampling):
    check(far, name, params, waits, sampling)


def uses_random(params):
    """Return True if the method uses random numbers under every rule. A GPU's generator differs."""
    return "rate" in params


@pytest.mark.gpu
@pytest.mark.parametrize(
    ("name", "params", "waits", "sampling"),
    [case for case in cases(RULES[:2]) if not uses_random(case.values[1])],
)
def test_a_gpu_makes_the_cpus_steps(real, name, params, waits, sampling):
    check(real, name, params, waits, sampling)


RECORDED = ("vanilla", "sps", "eagle2", "eagle3", "sps-tree", "staged", "pld", "pearl")


@pytest.mark.parametrize("name", RECORDED)
def test_replayed_forwards_make_the_cpus_steps_without_more_waits(far, name):
    check_recorded(far, name)


@pytest.mark.gpu
@pytest.mark.parametrize("name", [name for name in CASES if not uses_random(CASES[name][0][0])])
def test_graphs_on_a_gpu_make_the_cpus_steps_without_more_waits(real, name):
    check_recorded(real, name)


def check_recorded(far, name):
    budget, params = BUDGETS.get(name, 8), CASES[name][0][0]
    there = far.decode(name, params, budget=budget, recorded=True)
    assert same_decode(far.decode(name, params, device=CPU, budget=budget), there)
    launched = far.decode(name, params, budget=budget)
    assert [len(trace.waits) for trace in there[1]] == [len(trace.waits) for trace in launched[1]]
    recorded = far.workspace(FAR, recorded=True).recorded
    far.decode(name, params, budget=budget, recorded=True)
    assert far.workspace(FAR, recorded=True).recorded == recorded


@pytest.mark.parametrize("threshold", [0.0, 0.05, 2.0])
def test_a_draft_of_nested_sizes_waits_once_per_token(far, places, threshold):
    """The confidence of the draft's first layers decides which layers run next."""
    deep = {**places, "draft": places["target"]}
    params = {"length": 3, "threshold": threshold}
    there = far.decode("s2d", params, budget=8, places=deep)
    assert same_decode(far.decode("s2d", params, device=CPU, budget=8, places=deep), there)
    for trace in there[1][1:]:
        assert len(trace.waits) == count_verification(trace, draws=False) + trace.step.draft.nodes


def check(far, name, params, waits, sampling):
    budget = BUDGETS.get(name, 6)
    there = far.decode(name, params, sampling, budget=budget)
    assert same_decode(far.decode(name, params, sampling, device=CPU, budget=budget), there)
    for trace in there[1][1:]:  # the first step includes prefill
        due = count_verification(trace, sampling.draws) + waits(trace, sampling.draws)
        assert len(trace.waits) == due, (trace.step.draft, trace.waits)
        assert trace.clocks == CLOCKS.get(name, (0, 0))[trace.room < 2]
    assert any(trace.step.draft.nodes for trace in there[1]) == registry.load(name).proposes


@pytest.mark.parametrize("sampling", RULES, ids=lambda sampling: sampling.rule)
@pytest.mark.parametrize(
    ("name", "params"),
    [("vanilla", {}), ("sps", {"length": 3}), ("eagle2", {"depth": 3, "width": 3}), ("mirror", {})],
)
def test_half_precision_makes_the_same_steps(far, name, params, sampling):
    here, there = (
        far.decode(name, params, sampling, dtype=torch.bfloat16, device=device, budget=6)
        for device in (CPU, FAR)
    )
    assert same_decode(here, there)


@pytest.mark.parametrize("family", ["mistral", "qwen2", "qwen3", "gemma2"])
def test_models_of_every_kind_run_on_the_device(far, tiny_checkpoint, family):
    places = {"target": tiny_checkpoint(family), "draft": tiny_checkpoint(family, seed=1)}
    here, there = (
        far.decode("sps-tree", GROWN, device=device, budget=6, places=places)
        for device in (CPU, FAR)
    )
    assert same_decode(here, there)
    assert all(len(trace.waits) == 2 for trace in there[1][1:] if trace.step.draft.nodes)


@pytest.mark.parametrize("name", ["sps", "eagle2"])
def test_transformers_own_module_makes_the_same_steps(far, name):
    here, there = (far.decode(name, device=device, budget=6, hosted=True) for device in (CPU, FAR))
    assert same_decode(here, there)


@pytest.mark.parametrize(("name", "params", "waits"), [("vanilla", {}, 1), ("sps-tree", GROWN, 2)])
def test_a_batch_waits_as_often_as_its_sequences(far, monkeypatch, name, params, waits):
    def counted_random(*key, **rest):
        return SeededRandom(*key[:-1], CPU, **rest)

    monkeypatch.setattr(session_view, "SeededRandom", counted_random)
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


def test_a_replayed_recording_waits_once_per_step(far):
    here, _ = far.decode("vanilla", device=CPU)
    output, steps = far.decode("eagle2", {"depth": 3}, recording=here)
    assert output == here
    assert {len(trace.waits) for trace in steps[1:] if trace.step.draft.nodes} == {2}

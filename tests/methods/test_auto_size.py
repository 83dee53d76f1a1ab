"""Tree sizes chosen by the measured cost of forwards."""

import pytest

from methods.eagle2 import Eagle2
from methods.eagle3.method import Eagle3
from methods.sps_tree import SpsTree
from specbench_cli.engine.verify.sampling import Sampling
from specbench_cli.errors import MethodFault

GREEDY = Sampling()
COUPLED = Sampling("coupled", 0.8, seed=3)
AUTO = {
    "sps-tree": lambda: SpsTree(SpsTree.Params(shape="dynamic", nodes="auto", width=4)),
    "eagle2": lambda: Eagle2(Eagle2.Params(nodes="auto")),
    "eagle3": lambda: Eagle3(Eagle3.Params(nodes="auto")),
}
METHODS = pytest.mark.parametrize("make", AUTO.values(), ids=AUTO.keys())


def decode(method, session, slope):
    """Return the nodes of each step, if each further row adds `slope` to a target forward."""
    session._workspace.costs = lambda model, rows: (
        1 + slope * (rows - 1) if model == "target" else 0.1
    )
    return [step.draft.nodes for step in method.generate(session)]


@METHODS
@pytest.mark.parametrize("sampling", [GREEDY, COUPLED], ids=lambda s: s.rule)
def test_output_is_that_of_plain_decoding_and_trees_are_small_if_rows_are_expensive(
    open_session, clear_prompts, plain, make, sampling
):
    for prompt in clear_prompts(sampling, 2):
        mean = []
        for slope in (0.0, 0.3, 30.0):
            session = open_session(prompt, sampling)
            nodes = decode(make(), session, slope)
            assert session.output() == plain(prompt, sampling).ids
            mean.append(sum(nodes) / len(nodes))
        assert mean == sorted(mean, reverse=True)
        assert mean[0] > 16
        assert mean[-1] < 1


@METHODS
def test_a_run_without_costs_is_refused_with_the_reason(open_session, make):
    session = open_session(0)
    session._workspace.costs = None
    with pytest.raises(MethodFault, match="has not measured the costs") as caught:
        list(make().generate(session))
    assert "uses_costs" in caught.value.hint
    assert open_session(0)._workspace.costs is not None  # of this session only


@METHODS
def test_only_sizes_that_are_chosen_by_time_depend_on_it(make):
    chosen = make()
    assert (chosen.uses_costs, chosen.timing_free) == (True, False)
    plain = type(chosen)()
    assert (plain.uses_costs, plain.timing_free) == (False, True)


@pytest.mark.parametrize("nodes", [0, -1, 1.5, "some", True])
def test_a_size_is_an_integer_or_auto(nodes):
    with pytest.raises(ValueError, match="must be a whole number from 1, or auto"):
        Eagle2.Params(nodes=nodes)

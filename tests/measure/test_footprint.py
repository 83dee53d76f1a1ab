"""Tests of predicted memory against the bytes that tensors use."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from specbench_cli.config.run import RunConfig
from specbench_cli.engine.batch import Batch
from specbench_cli.engine.request import Request
from specbench_cli.engine.verify.sampling import Sampling
from specbench_cli.errors import UsageError
from specbench_cli.measure.bench import Bench
from specbench_cli.measure.memory import MemoryTracker
from specbench_cli.measure.memory_budget import MemoryModel, expected_tokens, fit_to_budget
from specbench_cli.plan.plan import make_plan


def config(*methods, **options):
    rows = [{"name": "vanilla"}, *({"name": m} if isinstance(m, str) else m for m in methods)]
    settings = {"limit": 8, "max_new_tokens": 8, "category": ["qa", "rag"], **options}
    return RunConfig.model_validate({"methods": rows, **settings})


@pytest.mark.parametrize(
    ("name", "batch", "rule"),
    [("pld", 1, "greedy"), ("eqspec", 4, "rejection"), ("sps-tree", 4, "coupled")],
)
def test_predicted_bytes_equal_the_bytes_of_the_tensors(name, batch, rule):
    temperature = 0.0 if rule == "greedy" else 0.8
    requested = config(name, batch=batch, verify=rule, temperature=temperature)
    found = MemoryModel(requested).compute_footprint(batch, 99)
    plan = make_plan(requested)
    bench = Bench(plan)
    requests = []
    for question in plan.questions:
        ids = bench.encode_prompt(question)
        bench.workspace.reserve(len(ids) + 8)
        requests.append(Request(question.prompt_id, 1, tuple(ids), bench.stop_rule(8)))
    sampling = Sampling(rule, temperature)
    with MemoryTracker() as tracker:
        for n in (1, len(requests)):  # the first batch has one prompt, as in the warm-up
            for method_run in plan.method_runs:
                slots = method_run.method.max_sequences(batch)
                batch_of_requests = Batch(
                    bench.workspace, requests[:n], sampling, size=batch, slots=slots
                )
                for _ in method_run.method.generate_batch(batch_of_requests):
                    pass
    assert found.weights + found.draft == bench.workspace.weight_bytes
    assert found.rows == bench.workspace.state_bytes
    assert found.total == pytest.approx(bench.workspace.weight_bytes + tracker.peak, rel=0.05)


def test_memory_tracker_counts_current_and_peak_bytes():
    with MemoryTracker() as tracker:
        tensor = torch.zeros(100)
        for _ in range(3):
            torch.ones(1000)
        view = tensor[10:]
    assert (tracker.held, tracker.peak) == (400, 4400)
    del tensor, view
    assert tracker.held == 0


@given(st.floats(0.05, 0.95), st.integers(0, 30))
def test_a_tree_yields_no_fewer_tokens_than_a_chain_with_as_many_nodes(probability, nodes):
    chain, tree = (expected_tokens(probability, nodes, tree=each) for each in (False, True))
    assert chain == pytest.approx(sum(probability**k for k in range(nodes + 1)))
    assert tree >= chain - 1e-9
    assert expected_tokens(probability, nodes + 1, tree=True) > tree


def test_settings_shrink_with_the_budget_and_never_exceed_the_request():
    requested = config("eqspec", batch=6)
    memory_model = MemoryModel(requested)
    sizes = [
        memory_model.compute_footprint(batch, most).total
        for batch, most in ((6, 5), (3, 5), (1, 1))
    ]
    assert sizes == sorted(sizes, reverse=True)
    chosen = []
    for limit in (10**10, sizes[0], sizes[0] - 1, sizes[1], sizes[2]):
        found, facts = fit_to_budget(requested.model_copy(update={"memory_budget": str(limit)}))
        assert facts["predicted"]["total"] <= limit == facts["budget_bytes"]
        drafts = facts["chosen"]["drafts"]
        assert (found.batch, drafts["vanilla"]) == (facts["chosen"]["batch"], 0)
        assert found.methods[1].params.get("length", 5) == drafts["eqspec"] <= 5
        chosen.append((found.batch, drafts["eqspec"]))
    assert chosen[:2] == [(6, 5)] * 2 and chosen[-1] == (1, 1)
    assert chosen[2] < (6, 5) and chosen[3][0] >= 3
    with pytest.raises(
        UsageError, match=r"is too small: batch size 1 .*weights (34\.1|29\.9) MB"
    ) as refused:
        fit_to_budget(requested.model_copy(update={"memory_budget": str(sizes[2] - 1)}))
    assert "MB or more" in refused.value.hint


def test_methods_with_unpredictable_memory_are_rejected():
    for row, why in (
        ({"name": "eagle2"}, "the memory of eagle2 cannot be predicted"),
        ({"name": "sps-tree", "params": {"nodes": "auto"}}, "nodes=auto is chosen when the run"),
    ):
        with pytest.raises(UsageError, match=why):
            fit_to_budget(config(row, memory_budget="1GB"))


@pytest.mark.parametrize("text", ["", "0", "-1GB", "2 apples", "GB", "nan", "1e400"])
def test_an_invalid_budget_is_rejected_with_valid_examples(text):
    with pytest.raises(ValueError, match=r"must be a size above 0 such as 2GB, 500MB or 1\.5GiB"):
        config(memory_budget=text)

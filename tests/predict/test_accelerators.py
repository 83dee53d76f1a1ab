"""Roofline times against sums by hand, and their change with the inputs."""

from dataclasses import replace

import numpy as np
import pytest

from specbench_cli.errors import UsageError
from specbench_cli.measure.costs import Costs
from specbench_cli.models.aliases import UNITS, aliases
from specbench_cli.models.shapes import ModelShape, load_shapes, parse_pair
from specbench_cli.predict.accelerators import (
    CONTEXTS,
    INPUTS,
    ROWS,
    Accelerator,
    Roofline,
    distinct_experts,
    load_accelerators,
)

SMALL = ModelShape(
    layers=2, hidden=8, mlp=16, heads=4, kv_heads=2, vocab=32, positions=64, source="made"
)
MIXED = SMALL.model_copy(update={"family": "mixtral", "experts": 8, "chosen": 2})
"""Attention 200 numbers a layer, an MLP 384, a router 8 (of the mixture 72), the output 264; a
token leaves 16 numbers in the state."""


def make(devices=1, shape=SMALL, **changes):
    """Return a roofline with round numbers.

    A device reads one 2-byte number per ns and computes 1000 operations per ns.
    """
    device = Accelerator(
        name="made",
        memory=1e4,
        bandwidth=2e9,
        flops={"bfloat16": 1e12},
        link=1e9,
        source="made",
        read=("here",),
    )
    roofline = Roofline(
        hardware="made",
        accelerator=device,
        devices=devices,
        names={"target": "small"},
        shapes={"target": shape},
        dtype="bfloat16",
    )
    return replace(roofline, **changes)


def test_a_memory_bound_forward_takes_its_bytes_over_the_bandwidth():
    weights = 2 * (200 + 8 + 384) + 264
    # 4 KV rows are read and the new one is written: 5 rows of the state.
    assert make().forward_ns("target", 1, 4) == pytest.approx(weights + 5 * 16)
    assert make(overhead=50.0).forward_ns("target", 1, 4) == pytest.approx(weights + 5 * 16 + 50)


def test_a_compute_bound_forward_takes_its_operations_over_the_peak():
    slow = make().accelerator.model_copy(update={"flops": {"bfloat16": 1e9}})
    found = make(accelerator=slow).forward_ns("target", 3, 4)
    products = 2 * 3 * 2 * (200 + 8 + 384)
    attended = (
        4 * (3 * 4 + 6) * 2 * 4 * 2
    )  # each row attends to earlier rows, rows of the batch, itself
    scores = 2 * 3 * 32 * 8
    assert found == pytest.approx(products + attended + scores)


def test_a_batch_reads_the_weights_once_and_every_kv_state():
    weights = 2 * (200 + 8 + 384) + 264
    assert make(batch=3).forward_ns("target", 1, 4) == pytest.approx(weights + 3 * 5 * 16)
    assert make(context=10).forward_ns("target", 1, 4) == pytest.approx(weights + 11 * 16)


def test_tensor_parallel_devices_share_all_work_except_the_all_reduce():
    one, two = make().forward_ns("target", 1, 4), make(2).forward_ns("target", 1, 4)
    # 2 layers with 2 all-reduces each, of 8 numbers of 2 bytes. A ring of two sends them once.
    assert two == pytest.approx(one / 2 + 4 * 16)
    # Four devices with two KV heads store each head twice.
    weights, state = (2 * (200 + 8 + 384) + 264) / 4, 5 * 16 / 2
    assert make(4).forward_ns("target", 1, 4) == pytest.approx(weights + state + 4 * 1.5 * 16)


def test_a_mixture_of_experts_reads_only_the_routed_experts():
    def expected(rows):
        touched = 8 * (1 - 0.75**rows)
        return 2 * (200 + 72 + touched * 384) + 264 + (4 + rows) * 16

    for rows in (1, 2, 8, 40):
        assert make(shape=MIXED).forward_ns("target", rows, 4) == pytest.approx(expected(rows))
    assert 8 * (1 - 0.75) == 2  # one row: only its routed experts


def test_expected_distinct_experts_match_a_simulation():
    draw = np.random.default_rng(0)
    for experts, chosen, rows in ((8, 2, 5), (128, 8, 16), (4, 4, 3), (60, 6, 1)):
        routed = draw.random((2000, rows, experts)).argsort(-1)[..., :chosen].reshape(2000, -1)
        n_distinct = [len(set(each)) for each in routed.tolist()]
        error = 4 * np.std(n_distinct) / len(n_distinct) ** 0.5 + 1e-9
        assert distinct_experts(experts, chosen, rows) == pytest.approx(
            np.mean(n_distinct), abs=error
        )
    assert distinct_experts(8, 2, 10_000) == pytest.approx(8)
    assert make(shape=MIXED).scale_input("experts", 1.5).forward_ns(
        "target", 64, 4
    ) == pytest.approx(
        make(shape=MIXED.model_copy(update={"chosen": 8})).forward_ns("target", 64, 4)
    )


@pytest.mark.parametrize("name", ["h100", "a100x8", "mi300x"])
@pytest.mark.parametrize("models", ["llama-2-70b+7b", "mixtral-8x7b"])
def test_a_faster_device_is_never_modelled_slower(name, models):
    roofline = Roofline.from_options(name, models)
    for role in roofline.shapes:
        for new, context in ((1, 16), (8, 1024), (64, 100), (512, 0)):
            now = roofline.forward_ns(role, new, context)
            for faster in ("bandwidth", "flops", "link"):
                assert roofline.scale_input(faster, 1.1).forward_ns(role, new, context) <= now
            for more in set(INPUTS) - {"bandwidth", "flops", "link"}:
                assert roofline.scale_input(more, 1.1).forward_ns(role, new, context) >= now
            assert roofline.forward_ns(role, new + 1, context) >= now
            assert roofline.forward_ns(role, new, context + 1) >= now


def test_the_cost_table_equals_the_roofline_and_interpolates():
    roofline = Roofline.from_options("h100x2", "llama-2-70b+7b")
    table = roofline.make_cost_table({"target": {"n_layers": 8}})
    assert (
        table.models["target"]["n_layers"] == 8
    )  # the run's own number, which the traces refer to
    for role in ("target", "draft"):
        for n in ROWS:
            for at in CONTEXTS:
                assert table.curves[role].ns(n, at) == pytest.approx(
                    roofline.forward_ns(role, n, at)
                )
        for n, at in ((3, 77), (33, 500), (100, 3000)):
            between = table.curves[role].ns(n, at)
            assert between == pytest.approx(roofline.forward_ns(role, n, at), rel=0.01)
    assert (table.host_ns(3, 4, steps=5), table.batch) == (0, None)


def test_a_cost_table_is_loaded_unchanged(tmp_path):
    table = Roofline.from_options("h100", "llama-2-7b").make_cost_table({})
    table.save(tmp_path / "table.json")
    assert Costs.load(tmp_path / "table.json") == table


def test_under_load_each_further_sequence_reads_its_own_kv_state():
    roofline = make()
    table = roofline.make_cost_table({}, together=4, mean=10.0)
    assert table.batch.most == 4
    assert table.batch.beside["target"] == pytest.approx(10 * 16)


def test_models_that_do_not_fit_are_refused_with_their_bytes():
    numbers = SMALL.parameters
    assert numbers == 2 * (200 + 8 + 384) + 264 + 32 * 8
    make().check_fits(10)
    with pytest.raises(UsageError) as fault:
        make(batch=100).check_fits(10)
    assert f"they need {2 * numbers + 100 * 10 * 32:,} bytes" in fault.value.message
    assert "but made has 10,000" in fault.value.message
    with pytest.raises(UsageError, match="models do not fit") as fault:
        Roofline.from_options("h100", "llama-2-70b").check_fits(1)
    assert fault.value.hint.startswith("--hardware h100x2, or a smaller --batch")
    Roofline.from_options("h100x2", "llama-2-70b").check_fits(1)


@pytest.mark.parametrize(
    ("hardware", "models", "dtype", "message"),
    [
        ("h1000", "llama-2-7b", "bfloat16", "unknown hardware 'h1000'"),
        ("h100x0", "llama-2-7b", "bfloat16", "unknown hardware 'h100x0'"),
        ("h100", "llama-9", "bfloat16", "unknown shape 'llama-9'"),
        ("h100", "llama-2-70b+9b", "bfloat16", "unknown shape '9b'"),
        ("h100", "llama-2-70b", "int8", "--dtype int8: the peak FLOPS of h100 are not known"),
        ("rtx-4090x2", "llama-2-7b", "bfloat16", "the bandwidth between devices of this kind"),
    ],
)
def test_an_unknown_name_lists_the_known_ones(hardware, models, dtype, message):
    with pytest.raises(UsageError) as fault:
        Roofline.from_options(hardware, models, dtype=dtype)
    assert message in fault.value.message
    assert fault.value.hint


def test_a_draft_of_the_same_family_is_named_by_its_size():
    assert parse_pair("llama-2-70b+7b") == {"target": "llama-2-70b", "draft": "llama-2-7b"}
    assert parse_pair("llama-2-70b+llama-68m") == {"target": "llama-2-70b", "draft": "llama-68m"}
    assert parse_pair("mixtral-8x7b") == {"target": "mixtral-8x7b"}


PUBLISHED = {
    "llama-68m": "llama-68m",
    "tinyllama-1.1b": "tinyllama-1.1b-chat",
    "llama-2-7b": "llama-2-7b-chat",
    "llama-2-13b": "llama-2-13b-chat",
    "llama-2-70b": "llama-2-70b-chat",
    "llama-3-8b": "llama-3-8b-instruct",
    "llama-3-70b": "llama-3-70b-instruct",
    "llama-3.2-1b": "llama-3.2-1b-instruct",
}


def test_shapes_have_the_parameter_counts_of_their_models():
    for name, alias in PUBLISHED.items():
        parameters = aliases()[alias].parameters
        digits = parameters[:-1]
        places = len(digits.partition(".")[2])
        assert f"{load_shapes()[name].parameters / UNITS[parameters[-1]]:.{places}f}" == digits
    assert f"{load_shapes()['mixtral-8x7b'].parameters / 1e9:.1f}" == "46.7"
    assert f"{load_shapes()['qwen3-30b-a3b'].parameters / 1e9:.1f}" == "30.5"
    assert f"{load_shapes()['qwen2-7b'].parameters / 1e9:.2f}" == "7.62"


def test_every_entry_names_its_source():
    for device in load_accelerators().values():
        assert device.source.startswith("https://") and device.read
        assert device.flops["bfloat16"] > device.flops.get("float32", 0)
    assert all(
        each.source.startswith("https://") or "tiny" in n for n, each in load_shapes().items()
    )

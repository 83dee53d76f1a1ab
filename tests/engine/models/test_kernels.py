"""Kernels of recorded forwards, run by Triton's interpreter on a CPU: they equal torch's
operations."""

from __future__ import annotations

import os

import pytest
import torch
import torch.nn.functional as F

from specbench_cli.engine.models import fused
from specbench_cli.engine.models.layers import LayerReader
from specbench_cli.engine.models.load import load_decoder
from specbench_cli.engine.types import Tokens

pytestmark = pytest.mark.triton

CLOSE = {"atol": 3e-2, "rtol": 2e-2}


@pytest.fixture(scope="module")
def kernels():
    os.environ["TRITON_INTERPRET"] = "1"  # read when Triton is imported
    from specbench_cli.engine.models.cuda import kernels

    return kernels


def half(*size):
    return torch.randn(size).half()


def test_rms_norm_equals_torchs_also_for_strided_rows(kernels):
    rows, weight = half(3, 5, 200), half(200)
    for part in (rows, rows[:, -1], rows[1]):
        wanted = torch.rms_norm(part.float(), (200,), weight.float(), 1e-5)
        torch.testing.assert_close(kernels.rms_norm(part, weight, 1e-5).float(), wanted, **CLOSE)


def test_silu_mul_equals_torchs(kernels):
    gate_up = half(3, 3000)
    gate, up = gate_up.float().chunk(2, -1)
    torch.testing.assert_close(kernels.silu_mul(gate_up).float(), F.silu(gate) * up, **CLOSE)


@pytest.mark.parametrize("width", [64, 2048, 2300])
def test_a_row_times_weights_plus_residual_equals_torchs(kernels, width):
    row, weight, bias, there = half(1, width), half(37, width) / 8, half(37), half(1, 37)
    wanted = row.float() @ weight.float().t()
    alone = kernels.multiply_row(row, weight, None, half(1, 37))
    torch.testing.assert_close(alone.float(), wanted, **CLOSE)
    wanted += bias.float() + there.float()
    both = kernels.multiply_row(row, weight, bias, there, add=True)
    torch.testing.assert_close(both.float(), wanted, **CLOSE)


@pytest.mark.parametrize("clean", [False, True])
def test_rotated_keys_and_values_are_stored_in_their_rows(kernels, clean):
    n, heads, kv, d = 3, 4, 2, 12
    qkv, cos, sin, held = half(n, (heads + 2 * kv) * d), half(n, 1, d), half(n, 1, d), half(4, 9, d)
    by_head = qkv.view(n, -1, d)
    if clean:
        by_head[0, -1, 0], by_head[1, -1, -1], by_head[2, -2, 3] = torch.nan, torch.inf, -torch.inf
    before, was = by_head.float().clone(), held.clone()
    turned = before * cos.float() + before.roll(d // 2, -1) * sin.float()
    kernels.rotate_and_store(qkv, cos, sin, torch.tensor([4, 5, 6]), held, kv, clean=clean)
    stored = held[:, 4:7].float().transpose(0, 1)
    largest = torch.finfo(torch.float16).max
    values = before[:, heads + kv :].nan_to_num(0, largest, -largest)
    torch.testing.assert_close(by_head[:, :heads].float(), turned[:, :heads], **CLOSE)
    torch.testing.assert_close(stored[:, :kv], turned[:, heads : heads + kv], **CLOSE)
    torch.testing.assert_close(stored[:, kv:], values, **CLOSE)
    assert stored.isfinite().all()
    assert held[:, :4].equal(was[:, :4])
    assert held[:, 7:].equal(was[:, 7:])


@pytest.mark.parametrize("window", [None, 5])
@pytest.mark.parametrize(("n", "kv", "heads"), [(1, 4, 4), (1, 2, 6), (3, 2, 6), (20, 4, 4)])
def test_a_chain_attends_to_visible_rows_only(kernels, n, kv, heads, window):
    d, start = 16, 70
    qkv, held, out = half(n, (heads + 2 * kv) * d), half(2 * kv, 100, d), half(n, heads * d)
    held[:, start + n :] = torch.nan
    rows = torch.arange(start, start + n)
    kernels.attend(qkv, held, rows, out, kv, window, 0.3)
    queries = qkv.view(n, -1, d)[:, :heads].float().transpose(0, 1)
    seen = held[:, : start + n].float().repeat_interleave(heads // kv, 0)
    columns = torch.arange(start + n)
    sees = columns <= rows[:, None]
    if window:
        sees &= columns > rows[:, None] - window
    wanted = F.scaled_dot_product_attention(queries, seen[:heads], seen[heads:], sees, scale=0.3)
    torch.testing.assert_close(out.float(), wanted.transpose(0, 1).flatten(1), **CLOSE)


@pytest.mark.parametrize(
    ("family", "more"),
    [("llama", {}), ("mistral", {"sliding_window": 7}), ("qwen3", {}), ("qwen2", {})],
)
def test_a_recorded_forward_with_kernels_is_unchanged(
    kernels, tiny_checkpoint, monkeypatch, family, more
):
    """Test chains of one and several rows, a tree, and the row after it.

    In float64 a CPU lays out norms and rotations as a GPU does in half precision.
    """
    monkeypatch.setattr(fused, "find_triton_kernels", lambda device, dtype: kernels)
    monkeypatch.setattr(LayerReader, "store", lambda self, weight: weight)
    folder = tiny_checkpoint(family, **more)
    plain, own = (load_decoder(folder, name="target", dtype=torch.float64) for _ in range(2))
    own.record(lambda body: body)
    states = [each.new_state(60) for each in (plain, own)]
    mask = torch.tensor([[1, 0, 0], [1, 1, 0], [1, 0, 1]], dtype=torch.bool)
    for n, tree in ((9, False), (1, False), (4, False), (3, family != "mistral"), (1, False)):
        ids, how = torch.randint(0, 197, (1, n)), {}
        if tree:
            how = {"mask": mask, "positions": states[0].position() + torch.tensor([[0, 1, 1]])}
        one, other = (
            decoder.forward(Tokens(ids), state, logits_at="all", **how)
            for decoder, state in zip((plain, own), states, strict=True)
        )
        torch.testing.assert_close(one.rows, other.rows, atol=1e-4, rtol=1e-4)
        for state in states:
            state.commit(0, range(n))
    assert own.recorded

"""Forms of the matrix product: they agree with each other, for any number of rows."""

from __future__ import annotations

import subprocess
import sys

import pytest
import torch

from specbench_cli.engine.models.linear import BACKEND_VARIABLE, choose_backend, linear
from specbench_cli.errors import UsageError

CLOSE = 2e-6
AVX512 = torch.backends.cpu.get_cpu_capability().startswith("AVX512")
"""Without oneDNN bfloat16 cannot be packed."""


def problem(
    rows: int, bias: bool, n_out: int = 320
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor | None]:
    torch.manual_seed(rows)
    return (
        torch.randn(rows, 256),
        torch.randn(256, n_out) / 16,
        torch.randn(n_out) if bias else None,
    )


def close(a: torch.Tensor, b: torch.Tensor) -> bool:
    return bool((a - b).abs().max() <= CLOSE * b.abs().max())


@pytest.mark.parametrize("bias", [False, True])
@pytest.mark.parametrize("rows", [1, 6, 16, 300])
@pytest.mark.parametrize(
    ("backend", "n_out"),
    [("packed", 320), ("blocked", 320), ("blocked", 336), ("blocked", 330), ("tiled", 322)],
)
def test_other_forms_agree_with_plain(backend: str, n_out: int, rows: int, bias: bool) -> None:
    """336 columns are whole wide blocks, 320 are whole narrow blocks, 330 are neither."""
    x, weight, b = problem(rows, bias, n_out)
    plain, other = linear(weight, b, backend="plain"), linear(weight, b, backend=backend)
    assert close(other(x), plain(x))
    assert close(other(x, torch.empty(rows, n_out)), plain(x))
    residual = torch.randn(rows, n_out)
    assert close(other.add_to(residual.clone(), x), plain.add_to(residual.clone(), x))


@pytest.mark.parametrize("backend", ["plain", "tiled", "blocked", "packed"])
def test_one_row_and_many_agree(backend: str) -> None:
    x, weight, b = problem(8, bias=True)
    product = linear(weight, b, backend=backend)
    assert close(torch.cat([product(row[None]) for row in x]), product(x))


def test_long_inputs_are_multiplied_in_blocks_of_few_sizes(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    x, weight, b = problem(520, bias=True)
    residual = torch.randn(520, 320)
    product = linear(weight, b, backend="packed")
    cut = torch.cat([product(part) for part in x.split(20)])
    added = cut + residual
    heights = set()
    multiplied, plus = product._product, product._product_plus
    monkeypatch.setattr(
        product, "_product", lambda x, *rest: heights.add(len(x)) or multiplied(x, *rest)
    )
    monkeypatch.setattr(
        product, "_product_plus", lambda x, *rest: heights.add(len(x)) or plus(x, *rest)
    )
    for n in (*range(65, 137), *range(250, 275), *range(490, 521)):
        assert close(product(x[:n]), cut[:n])
        assert close(product.add_to(residual[:n].clone(), x[:n]), added[:n])
    assert heights == {*range(72, 137, 8), 256, 272, 288, 496, 512, 544}


@pytest.mark.parametrize("backend", ["plain", "tiled", "blocked", "packed"])
@pytest.mark.parametrize("bias", [False, True])
def test_the_product_is_written_to_the_given_buffer(backend: str, bias: bool) -> None:
    x, weight, b = problem(5, bias)
    out = torch.empty(5, 320)
    product = linear(weight, b, backend=backend)
    assert product(x, out).data_ptr() == out.data_ptr()
    exact = x.double() @ weight.double() + (0 if b is None else b.double())
    assert close(out.double(), exact)


@pytest.mark.parametrize("backend", ["plain", "tiled"])
def test_columns_are_views_and_a_packed_form_has_none(backend: str) -> None:
    _, weight, _ = problem(1, bias=False)
    if backend == "tiled":
        weight = weight.t().contiguous().t()
    view = linear(weight, backend=backend).columns(10, 20)
    assert view is not None
    assert torch.equal(view, weight[:, 10:20].t())
    assert view.untyped_storage().data_ptr() == weight.untyped_storage().data_ptr()
    assert linear(weight, backend="packed").columns(10, 20) is None


def test_an_environment_variable_overrides_the_rule(monkeypatch: pytest.MonkeyPatch) -> None:
    _, weight, _ = problem(1, bias=False)
    for backend in ("plain", "tiled", "blocked", "packed"):
        monkeypatch.setenv(BACKEND_VARIABLE, backend)
        assert choose_backend(weight) == backend
    monkeypatch.setenv(BACKEND_VARIABLE, "tiled")
    assert choose_backend(torch.empty(72, 320)) == choose_backend(torch.empty(64, 321)) == "plain"


def test_unknown_form_in_the_variable_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(BACKEND_VARIABLE, "fast")
    with pytest.raises(UsageError, match="SPECBENCH_LINEAR=fast is unknown; it can be plain"):
        choose_backend(torch.zeros(2, 2))


def test_the_rule_does_not_depend_on_the_time_of_the_call() -> None:
    _, weight, _ = problem(1, bias=False)
    assert len({choose_backend(weight) for _ in range(5)}) == 1


def test_float16_is_always_plain(monkeypatch: pytest.MonkeyPatch) -> None:
    half = torch.zeros(2048, 2048, dtype=torch.float16)
    for backend in ("", "packed", "widened"):
        monkeypatch.setenv(BACKEND_VARIABLE, backend)
        assert choose_backend(half) == "plain"


@pytest.mark.parametrize(
    ("mkl", "bfloat16", "expected"),
    [
        ("slow", True, ("packed", "tiled", "packed", "tiled", "tiled")),
        ("slow", False, ("packed", "tiled", "packed", "tiled", "tiled")),
        ("slow, no numba", True, ("packed", "packed", "packed", "packed", "packed")),
        ("slow, no numba", False, ("packed", "packed", "packed", "packed", "packed16")),
        ("fast", True, ("plain", "blocked", "blocked", "packed", "packed")),
        ("fast", False, ("plain", "blocked", "blocked", "packed", "packed16")),
        ("none", True, ("plain", "plain", "packed", "packed", "packed")),
        ("none", False, ("plain", "plain", "packed", "packed", "packed16")),
    ],
)
def test_the_rule_depends_on_maker_size_and_instructions(mkl, bfloat16, expected, monkeypatch):
    monkeypatch.delenv(BACKEND_VARIABLE, raising=False)
    for name, value in (
        ("_can_pack", True),
        ("_can_pack_16", True),
        ("_has_mkl", mkl != "none"),
        ("_mkl_is_slow", mkl.startswith("slow")),
        ("_can_compile", "no numba" not in mkl),
        ("_multiplies_bfloat16", bfloat16),
    ):
        monkeypatch.setattr(f"specbench_cli.engine.models.linear.{name}", lambda value=value: value)
    shapes = ((512, 1023), (1024, 1024), (1024, 1025), (4096, 1026))
    matrices = [*(torch.empty(shape) for shape in shapes), torch.empty(1024, 256).bfloat16()]
    assert tuple(map(choose_backend, matrices)) == expected
    tiny = torch.empty(63, 64)
    assert {choose_backend(tiny), choose_backend(tiny.bfloat16())} == {"plain"}


def test_bfloat16_is_widened_without_instructions_and_without_fbgemm(monkeypatch):
    monkeypatch.delenv(BACKEND_VARIABLE, raising=False)
    for name in ("_can_pack_16", "_can_compile", "_multiplies_bfloat16"):
        monkeypatch.setattr(f"specbench_cli.engine.models.linear.{name}", lambda: False)
    assert choose_backend(torch.empty(1024, 256, dtype=torch.bfloat16)) == "widened"


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_tiled_rows_are_bit_identical_in_any_block_and_thread_count(dtype):
    """So a token's products in plain decoding equal those in verification."""
    torch.manual_seed(1)
    x, weight = torch.randn(60, 320).to(dtype), torch.randn(320, 1100).to(dtype)
    product, threads = linear(weight, backend="tiled"), torch.get_num_threads()
    alone = torch.cat([product(row[None]) for row in x])
    try:
        for count in (1, 2):
            torch.set_num_threads(count)
            for height in (2, 3, 4, 5, 6, 13, 60):
                blocks = torch.cat([product(block) for block in x.split(height)])
                assert torch.equal(blocks, alone), (count, height)
    finally:
        torch.set_num_threads(threads)


def test_numba_leaves_torch_as_many_threads_as_it_has() -> None:
    """Use a separate process, because OpenMP is initialised once."""
    code = """if True:
        import torch
        torch.set_num_threads(1)
        from specbench_cli.engine.models import kernels
        from specbench_cli.engine.models.linear import linear
        kernels.compile_kernels()
        assert torch.get_num_threads() == 1
        product = linear(torch.ones(16, 2), backend="tiled")
        for n in (1, 2, 1):
            torch.set_num_threads(n)
            product(torch.ones(1, 16))
            assert torch.get_num_threads() == n
    """
    subprocess.run([sys.executable, "-c", code], check=True)


def test_inf_and_nan_weights_affect_only_their_own_column() -> None:
    weight = torch.ones(64, 64)
    weight[3, 5], weight[9, 7] = torch.inf, torch.nan
    for dtype in (torch.float32, torch.bfloat16):
        y = linear(weight.to(dtype), backend="tiled")(torch.ones(2, 64, dtype=dtype))
        assert y[:, 5].isinf().all()
        assert y[:, 7].isnan().all()
        assert y.isfinite().sum() == 2 * 62


def test_rows_packed_in_16_bits_are_identical_in_any_block_and_thread_count():
    """So a token has the same logits alone and in any draft.

    With AVX-512 the bits are equal. Without it FBGEMM sums one row in another order than several,
    so float32 rounding differs.
    """
    torch.manual_seed(1)
    x, weight = torch.randn(40, 320).bfloat16(), torch.randn(320, 1100).bfloat16()
    product, threads = linear(weight, backend="packed16"), torch.get_num_threads()
    alone = torch.cat([product(row[None]) for row in x])
    try:
        for count in (1, 2):
            torch.set_num_threads(count)
            for height in (2, 6, 14, 15, 40):
                blocks = torch.cat([product(block) for block in x.split(height)])
                if AVX512:
                    assert torch.equal(blocks, alone), (count, height)
                torch.testing.assert_close(blocks, alone, rtol=2**-7, atol=1e-4)
                equal = (blocks == alone).float().mean()
                assert equal > 0.999, (count, height)
    finally:
        torch.set_num_threads(threads)


@pytest.mark.parametrize("largest", [-80, 0, 120])
def test_weights_of_any_size_keep_their_bits_in_float16(largest: int) -> None:
    """Use 32 powers of two below the largest, with all fractions of bfloat16."""
    fraction = 1 + torch.arange(128) / 128
    weight = (fraction * 2.0 ** (largest - torch.arange(32))[:, None]).bfloat16()
    assert torch.equal(linear(weight, backend="packed16")(torch.eye(32).bfloat16()), weight)


def test_smaller_weights_are_off_by_less_than_float32_rounding() -> None:
    weight = torch.tensor([[1.0], [1.1 * 2.0**-36]]).bfloat16()
    held = linear(weight, backend="packed16")(torch.eye(2).bfloat16())
    assert (held - weight).abs().max() < 2.0**-40


def test_weights_that_are_not_finite_give_no_finite_products() -> None:
    weight = torch.ones(64, 64).bfloat16()
    weight[3, 5] = torch.inf
    assert not linear(weight, backend="packed16")(torch.ones(1, 64).bfloat16()).isfinite().any()


@pytest.mark.parametrize(
    "backend", ["plain", "tiled", "packed16", "widened", *(["packed"] if AVX512 else [])]
)
@pytest.mark.parametrize("bias", [False, True])
def test_bfloat16_products_are_rounded_once_for_any_number_of_rows(backend, bias):
    torch.manual_seed(0)
    x, weight = torch.randn(9, 256).bfloat16(), (torch.randn(256, 2100) / 16).bfloat16()
    b, residual = torch.randn(2100).bfloat16() if bias else None, torch.randn(9, 2100).bfloat16()
    exact = x.double() @ weight.double() + (0 if b is None else b.double())
    product = linear(weight, b, backend=backend)
    for rows in (1, 2, 3, 8, 9):
        out = torch.empty(rows, 2100, dtype=torch.bfloat16)
        assert product(x[:rows], out).data_ptr() == out.data_ptr()
        assert torch.equal(product(x[:rows]), out)
        # Half a unit in the last of 8 bits, plus the rounding of float32 sums.
        torch.testing.assert_close(out.double(), exact[:rows], rtol=2**-8, atol=1e-5)
        added = product.add_to(residual[:rows].clone(), x[:rows])
        # Rounded twice if a bias is added or the sum is rounded first.
        torch.testing.assert_close(
            added.double(), exact[:rows] + residual[:rows].double(), rtol=2**-6, atol=2**-6
        )

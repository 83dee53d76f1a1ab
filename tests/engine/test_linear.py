"""The forms of a product agree, with each other and for any number of rows."""

from __future__ import annotations

import pytest
import torch

from specbench_cli.engine.models.linear import FORM_VARIABLE, PlainLinear, form_for, linear
from specbench_cli.errors import UsageError

CLOSE = 2e-6


def problem(rows: int, bias: bool) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor | None]:
    torch.manual_seed(rows)
    return (
        torch.randn(rows, 256),
        torch.randn(256, 320) / 16,
        torch.randn(320) if bias else None,
    )


def close(a: torch.Tensor, b: torch.Tensor) -> bool:
    return bool((a - b).abs().max() <= CLOSE * b.abs().max())


@pytest.mark.parametrize("bias", [False, True])
@pytest.mark.parametrize("rows", [1, 6, 16])
def test_packed_and_plain_agree(rows: int, bias: bool) -> None:
    x, weight, b = problem(rows, bias)
    plain, packed = (linear(weight, b, form=form) for form in ("plain", "packed"))
    assert close(packed(x), plain(x))
    residual = torch.randn(rows, 320)
    assert close(packed.add_to(residual.clone(), x), plain.add_to(residual.clone(), x))


@pytest.mark.parametrize("form", ["plain", "packed"])
def test_one_row_and_many_agree(form: str) -> None:
    x, weight, b = problem(8, bias=True)
    product = linear(weight, b, form=form)
    assert close(torch.cat([product(row[None]) for row in x]), product(x))


@pytest.mark.parametrize("form", ["plain", "packed"])
@pytest.mark.parametrize("bias", [False, True])
def test_product_is_right_and_fills_the_buffer_given(form: str, bias: bool) -> None:
    x, weight, b = problem(5, bias)
    out = torch.empty(5, 320)
    product = linear(weight, b, form=form)
    assert product(x, out).data_ptr() == out.data_ptr()
    exact = x.double() @ weight.double() + (0 if b is None else b.double())
    assert close(out.double(), exact)


def test_plain_columns_are_views_and_packed_has_none() -> None:
    _, weight, _ = problem(1, bias=False)
    view = linear(weight, form="plain").columns(10, 20)
    assert view is not None
    assert torch.equal(view, weight[:, 10:20].t())
    assert view.untyped_storage().data_ptr() == weight.untyped_storage().data_ptr()
    assert linear(weight, form="packed").columns(10, 20) is None


def test_variable_overrides_the_rule(monkeypatch: pytest.MonkeyPatch) -> None:
    _, weight, _ = problem(1, bias=False)
    for form in ("plain", "packed"):
        monkeypatch.setenv(FORM_VARIABLE, form)
        assert form_for(weight) == form


def test_unknown_form_in_the_variable_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(FORM_VARIABLE, "fast")
    with pytest.raises(UsageError, match="SPECBENCH_LINEAR=fast is unknown; it can be plain"):
        form_for(torch.zeros(2, 2))


def test_rule_does_not_depend_on_when_it_is_asked() -> None:
    _, weight, _ = problem(1, bias=False)
    assert len({form_for(weight) for _ in range(5)}) == 1


def test_half_precision_is_never_packed(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(FORM_VARIABLE, "packed")
    assert isinstance(linear(torch.zeros(256, 256, dtype=torch.bfloat16)), PlainLinear)

"""Transfers of small arrays between device and host."""

import torch

from specbench_cli.engine import host

CPU = torch.device("cpu")


def test_ids_are_int64_in_one_or_several_rows():
    assert torch.equal(host.ids([3, 1], CPU), torch.tensor([3, 1]))
    assert host.ids([], CPU).dtype == torch.int64
    assert torch.equal(host.ids([[3, 1]], CPU), torch.tensor([[3, 1]]))


def test_several_tensors_are_returned_as_separate_lists():
    ids, values = torch.tensor([4, 1 << 40]), torch.tensor([0.5, -0.25, 2.0])
    assert host.lists(ids, values) == [[4, 1 << 40], [0.5, -0.25, 2.0]]


def test_integers_stay_integers_in_one_transfer():
    ids, values = torch.tensor([4, 1 << 40]), torch.tensor([0.5, -torch.inf])
    found = host.read_together(ids, values, torch.empty(0))
    assert found == [[4, 1 << 40], [0.5, -torch.inf], []]
    assert all(type(number) is int for number in found[0])


def test_nested_numbers_stay_nested_and_a_scalar_is_a_number():
    rows = torch.tensor([[1, 2], [3, 4]])
    assert host.numbers(rows) == [[1, 2], [3, 4]]
    assert host.number(rows[1, 0]) == host.number(rows[1, :1]) == 3
    assert host.to_numbers(rows[0, :1], torch.tensor(0.25)) == [1, 0.25]


def test_each_read_is_one_wait(monkeypatch):
    waits = []
    monkeypatch.setattr(host, "is_on_host", lambda device: False)
    monkeypatch.setattr(host, "wait", lambda tensor: waits.append(tensor.shape) or tensor.tolist())
    ids, values = torch.tensor([4, 1 << 40]), torch.tensor([0.5])
    assert host.lists(ids, values) == [[4, 1 << 40], [0.5]]
    assert host.lists(ids) == [[4, 1 << 40]]
    assert host.to_numbers(ids[1], values, torch.tensor(True)) == [1 << 40, 0.5, 1]
    assert host.number(values) == 0.5
    assert host.numbers(ids[None]) == [[4, 1 << 40]]
    assert waits == [(3,), (2,), (3,), (), (1, 2)]


def test_positions_are_cached():
    assert host.cached_ids((2, 0), CPU) is host.cached_ids((2, 0), CPU)
    assert host.cached_ids((2, 0), CPU).tolist() == [2, 0]

"""Small arrays on their way between device and host."""

import torch

from specbench_cli.engine import host

CPU = torch.device("cpu")


def test_ids_are_whole_numbers_of_64_bits_in_one_row_or_several():
    assert torch.equal(host.ids([3, 1], CPU), torch.tensor([3, 1]))
    assert host.ids([], CPU).dtype == torch.int64
    assert torch.equal(host.ids([[3, 1]], CPU), torch.tensor([[3, 1]]))


def test_several_tensors_come_as_lists_of_their_own():
    ids, values = torch.tensor([4, 1 << 40]), torch.tensor([0.5, -0.25, 2.0])
    assert host.lists(ids, values) == [[4, 1 << 40], [0.5, -0.25, 2.0]]


def test_in_one_transfer_whole_numbers_stay_whole():
    ids, values = torch.tensor([4, 1 << 40]), torch.tensor([0.5, -torch.inf])
    found = host.in_one(ids, values, torch.empty(0))
    assert found == [[4, 1 << 40], [0.5, -torch.inf], []]
    assert all(type(number) is int for number in found[0])

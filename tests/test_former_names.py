"""Names of before December 2026 that plug-ins, runs, baselines and certificates still use."""

import dataclasses

import pytest
import torch

from specbench_cli import api, former_names, registry
from specbench_cli.api import Draft, FixedLength, Length, tree_of_widths
from specbench_cli.errors import UsageError
from specbench_cli.store.schema import Params

IDS = torch.tensor([1, 2])


@pytest.mark.parametrize(
    ("law", "mode"),
    [("point", "deterministic"), ("iid", "independent"), ("wor", "without_replacement")],
)
def test_a_draft_by_its_former_law_has_the_draw_mode(law, mode):
    with pytest.warns(DeprecationWarning, match=f"`draw_mode='{mode}'`"):
        assert Draft(IDS, law=law).draw_mode == mode
    with pytest.warns(DeprecationWarning, match=repr(law)):
        draft = Draft(IDS, None, law)
    assert draft.draw_mode == mode
    assert dataclasses.replace(draft, tokens=IDS[:1]).draw_mode == mode


def test_method_parameters_take_the_former_name():
    declared = registry.declare("sps-tree", {"law": "iid"})
    assert declared.params.draw_mode == "independent"
    with pytest.raises(UsageError, match="law"):
        registry.declare("sps-tree", {"law": "other"})


def test_records_are_read_by_current_names():
    params = Params({"law": "wor"}, {"width": 2, "law": "wor"})
    assert params.passed == {"draw_mode": "without_replacement"}
    assert params.effective == {"width": 2, "draw_mode": "without_replacement"}


def test_the_api_has_members_by_former_names():
    for former, current in former_names.API.items():
        assert former not in api.__all__ and current in api.__all__
        with pytest.warns(DeprecationWarning, match=f"`{former}` is now `{current}`"):
            assert getattr(api, former) is getattr(api, current)
    with pytest.raises(AttributeError, match="no attribute 'Other'"):
        api.Other  # noqa: B018


def test_classes_have_members_by_former_names():
    tree = tree_of_widths((2, 1))
    with pytest.warns(DeprecationWarning, match=r"`TreeTemplate\.within` is now `truncate`"):
        assert tree.within(1, 2) == tree_of_widths((2,))
    with pytest.warns(DeprecationWarning, match="should_continue"):
        assert FixedLength(2).more(None, None)


def test_a_length_of_an_older_plug_in_continues_by_its_former_method():
    with pytest.warns(DeprecationWarning, match="continues_after"):

        class TwoTokens(Length):
            def goes_on(self, out, pick):
                return self.drafted < 2

    assert TwoTokens().should_continue(None, None)

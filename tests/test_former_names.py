"""Tests of deprecated names, which older plug-ins, runs, baselines and certificates use."""

import dataclasses
from types import SimpleNamespace

import pytest
import torch

from specbench_cli import api, registry
from specbench_cli.api import Draft, host
from specbench_cli.engine.drafting.transcript import Transcript
from specbench_cli.engine.drafting.vocabulary import Vocabulary
from specbench_cli.engine.look_ahead import LookAheadRows
from specbench_cli.engine.paused_forward import PausedForward
from specbench_cli.errors import UsageError
from specbench_cli.former_names import FormerMember
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


@pytest.mark.parametrize("former", sorted(api.FORMER_NAMES))
def test_members_of_the_api_keep_their_former_names(former):
    current = api.FORMER_NAMES[former]
    with pytest.warns(
        DeprecationWarning, match=rf"`specbench_cli.api.{former}` is now `{current}`"
    ):
        assert getattr(api, former) is getattr(api, current)
    assert former not in api.__all__


def test_functions_of_host_keep_their_former_names():
    with pytest.warns(DeprecationWarning, match="`to_numbers`"):
        assert host.each is host.to_numbers
    with pytest.raises(AttributeError, match="no attribute 'other'"):
        _ = host.other


@pytest.mark.parametrize(
    "cls",
    [
        *(api.AcceptRule, api.Batch, api.Method, api.ModelOutput, api.Partial, api.PeerSession),
        *(api.SegmentParams, api.SegmentRule, api.Segments, api.Session, api.Topics),
        *(LookAheadRows, PausedForward, Transcript, Vocabulary),
        *(api.KVState, api.LayerReader, api.Scratch, api.StopRule),
        *(api.Decoder, api.DraftSession, api.Drafter, api.Growth, api.Length, api.Metered),
        *(api.SuffixArray, api.TreeTemplate, api.Worker, api.Head, api.FeatureHead, api.ModelInput),
    ],
)
def test_members_of_classes_keep_their_former_names(cls):
    former = {
        name: member
        for base in cls.__mro__
        for name, member in vars(base).items()
        if isinstance(member, FormerMember)
    }
    assert former and not former.keys() & {member.current for member in former.values()}
    for name, member in former.items():
        if hasattr(cls, member.current):  # others are set by `__init__`
            with pytest.warns(DeprecationWarning, match=f"`{member.current}`"):
                assert getattr(cls, name) == getattr(cls, member.current)


def test_an_instance_has_its_members_by_their_former_names():
    out = api.ModelOutput(None, torch.zeros(1, 1, 1), {3: IDS})
    with pytest.warns(DeprecationWarning, match="`ModelOutput.taps` is now `aux_hidden_states`"):
        assert out.taps == {3: IDS}


def test_a_head_sets_its_captured_layers_by_the_former_name():
    with pytest.warns(DeprecationWarning, match="`FeatureHead.taps` is now `captured_layers`"):
        LastLayerHead = type("Last", (api.FeatureHead,), {"kind": "last", "taps": (2,)})
    assert LastLayerHead.captured_layers == (2,)
    head = LastLayerHead(SimpleNamespace(vocab_size=4))
    with pytest.warns(DeprecationWarning, match="`FeatureHead.taps` is now `captured_layers`"):
        head.taps = (0, 1)
    assert head.captured_layers == (0, 1)


def test_a_plug_in_overrides_members_by_their_former_names():
    members = {"name": "rule", "enough": lambda self, grade: grade > 1}
    with pytest.warns(DeprecationWarning, match="`SegmentRule.enough` is now `accepts`"):
        StrictSegmentRule = type("Rule", (api.SegmentRule,), members)
    assert StrictSegmentRule().judge(2).accepted and not StrictSegmentRule().judge(1).accepted
    with pytest.warns(DeprecationWarning, match="`AcceptRule.off` is now `is_exact`"):
        ExactRule = type("Exact", (api.AcceptRule,), {"name": "exact", "off": True})
    assert ExactRule().is_exact
    with pytest.warns(DeprecationWarning, match="`Method.needed` is now `requirements`"):
        DraftingMethod = type("Drafting", (api.Method,), {"needed": frozenset({"draft"})})
    assert DraftingMethod().requirements == {"draft"}
    with pytest.warns(DeprecationWarning, match="`Length.goes_on` is now `continues_after`"):
        TwoTokenLength = type(
            "Two", (api.Length,), {"goes_on": lambda self, out, pick: self.drafted < 2}
        )
    assert TwoTokenLength().should_continue(None, None)

"""Learning between requests: a row's own copy, its versions, and what may change when."""

from __future__ import annotations

import gc
from functools import partial

import pytest
import torch
from torch.nn.functional import cross_entropy

from methods.eagle.head import EagleHead
from specbench_cli.api import ArtifactSpec, Method
from specbench_cli.audit.models.head import make_table_artifact
from specbench_cli.audit.models.table import TableDecoder, random_table
from specbench_cli.audit.models.tiny import create_tiny_models
from specbench_cli.engine.learning import Memory, Topics, learn, make_trainable
from specbench_cli.engine.models.load import get_module
from specbench_cli.engine.models.meter import Metered
from specbench_cli.engine.models.transformers_decoder import TransformersDecoder
from specbench_cli.engine.request import Request
from specbench_cli.engine.sequence import StopRule
from specbench_cli.engine.session import Session
from specbench_cli.engine.types import Tokens
from specbench_cli.engine.verify.sampling import Sampling
from specbench_cli.engine.workspace import Workspace
from specbench_cli.errors import MethodFault

IDS = torch.tensor([[3, 1, 4, 1, 5, 2, 0]])


def taught(module, ids=IDS, rate=0.1):
    """One step towards a text."""
    rows = module(ids).logits[0, :-1]
    cross_entropy(rows, ids[0, 1:]).backward()
    torch.optim.SGD(module.parameters(), rate).step()


def said(decoder, ids=IDS):
    """Logits after each token."""
    with torch.inference_mode():
        return decoder.forward(Tokens(ids), decoder.new_state(9), logits_at="all").logits[0]


def fused():
    return create_tiny_models().workspace.decoders["draft"]


def hosted():
    with torch.inference_mode():  # as the audit makes its models
        return TransformersDecoder(make_trainable(fused(), ()).module, name="draft")


def table():
    with torch.inference_mode():
        return TableDecoder("draft", random_table(8, 3))


KINDS = pytest.mark.parametrize("make", [fused, hosted, table])


@KINDS
def test_a_copy_says_what_its_source_says_and_learns_without_it(make):
    source = make()
    before = said(source)
    with torch.inference_mode():  # where `start` asks for it
        made = make_trainable(source, [source])
    assert (made.name, type(made.module(IDS).logits)) == ("draft", torch.Tensor)
    torch.testing.assert_close(said(made), before, rtol=1e-4, atol=1e-4)
    memory = Memory()
    memory.get_copy("draft", lambda: made)
    taught(made.module)
    memory.publish()
    assert (said(made) - before).abs().max() > 1e-3
    torch.testing.assert_close(said(made), made.module(IDS).logits[0], rtol=1e-4, atol=1e-4)
    assert said(source).equal(before)
    assert all(weight.grad is None for weight in made.module.parameters())


@pytest.mark.parametrize("make", [fused, table])
def test_a_request_goes_on_with_the_version_that_it_began_with(make):
    made = make_trainable(make(), ())
    before = said(made)
    taught(made.module)
    assert said(made).equal(before)
    made.publish()
    assert not said(made).equal(before)


def test_a_decoder_without_a_module_is_refused():
    class Bare:
        name = "medusa"

    with pytest.raises(MethodFault, match="medusa cannot be trained: it has no torch module"):
        make_trainable(Bare(), ())


def test_what_a_module_reads_of_the_runs_models_is_not_copied_along():
    target = fused()

    class Head:
        def __init__(self):
            self.target, self.module = target, torch.nn.Linear(3, 3)

    source = Head()
    made = make_trainable(source, [target])
    assert made.target is target
    assert made.module.weight is not source.module.weight


def test_a_copy_of_the_target_is_told_from_it(workspace):
    session = opened(workspace)
    made = session.trainable("target")
    made.forward(session.pending_tokens(0), session.new_state(made))
    assert session.harness.meter.forwards[0].model == "target's copy"
    assert session.target.name == "target"


def test_a_head_of_the_run_can_be_trained_too():
    decoders = {name: TableDecoder(name, random_table(6, seed)) for name, seed in
                (("target", 1), ("draft", 2))}  # fmt: skip
    space = Workspace(decoders, 32, load_artifact=partial(make_table_artifact, decoders))
    memory, wanted = Memory(), ArtifactSpec(EagleHead)
    session = opened(space, memory)
    made, source = session.trainable(wanted), session.artifact(wanted)
    assert isinstance(made, Metered)
    assert made.target is source.target
    taught(made.module, rate=3.0)
    memory.publish()
    assert session.trainable(wanted).table.equal(made.module.table)
    assert not made.table.equal(source.table)


# ---- memory -------------------------------------------------------------------------------------


@KINDS
def test_a_memory_returns_to_what_was_saved_with_its_optimizer(make):
    memory, source = Memory(), make()
    made = memory.get_copy("draft", partial(make_trainable, source, ()))
    memory["adam"] = adam = torch.optim.Adam(made.module.parameters(), 0.01)
    memory["seen"] = [1]

    def step():
        cross_entropy(made.module(IDS).logits[0, :-1], IDS[0, 1:]).backward()
        memory["adam"].step()
        memory.publish()
        return said(made)

    step()
    saved, first = memory.save(), step()
    memory["seen"].append(2)
    for _ in range(2):  # what is restored can be restored again
        memory.restore(saved)
        assert memory["seen"] == [1]
        assert memory["adam"] is not adam
        assert memory.get_copy("draft", None) is made
        assert step().equal(first)


@KINDS
def test_a_copy_that_was_made_since_is_as_it_was_at_first(make):
    memory, saved, source = Memory(), Memory().save(), make()
    made = memory.get_copy("draft", partial(make_trainable, source, ()))
    before = said(made)
    taught(made.module)
    memory.version = 3
    memory.restore(saved)
    assert said(made).equal(before)
    assert (memory.version, dict(memory)) == (0, {})


# ---- topics -------------------------------------------------------------------------------------


def told(*prompts):
    topics = Topics()
    for topic, ids in prompts:
        topics.learn(ids, topic)
    return topics


def test_a_prompt_is_of_the_topic_whose_prompts_had_its_tokens():
    topics = told(("a", (1, 2, 3, 4)), ("b", (1, 7, 8, 8)))
    assert [topics.classify(ids) for ids in ((2, 3), (8, 9), (1, 7, 2, 8))] == ["a", "b", "b"]


def test_of_one_topic_are_all_prompts_and_of_none_all_before_one_is_told():
    assert Topics().classify((1, 2)) == ""
    assert told(("a", (1, 2))).classify((8, 9)) == "a"


def test_where_tokens_say_nothing_the_topic_that_is_asked_more_often_is_likelier():
    one, other = ("a", (1, 2)), ("b", (2, 1))
    assert told(one, other, other).classify((1,)) == "b"
    assert told(one, one, other).classify((1,)) == "a"


# ---- the hook -----------------------------------------------------------------------------------


class Taught(Method):
    """Drafts one token with its copy, and is taught the text."""

    name = "taught"
    state_scope = "run"

    def start(self, session):
        self.draft = session.trainable()
        self.state = session.new_state(self.draft)
        self.draft.forward(session.pending_tokens(0), self.state, logits_at=None)

    def propose(self, session, limit):
        out = self.draft.forward(session.pending_tokens(self.state.length()), self.state)
        return session.chain_of_picks([session.pick(out)]) if limit else session.chain(())

    def observe(self, session, outcome):
        self.state.rollback(0, min(self.state.length(), len(session.tokens()) - 1))

    def learn(self, session):
        taught(self.draft.module, torch.tensor([session.tokens()]), rate=3.0)


class TaughtTooSoon(Taught):
    """Is taught in `propose` too."""

    def propose(self, session, limit):
        with torch.inference_mode(False), torch.enable_grad():
            self.learn(session)
        return super().propose(session, limit)


@pytest.fixture
def workspace():
    decoders = {name: TableDecoder(name, random_table(6, seed)) for name, seed in
                (("target", 1), ("draft", 2))}  # fmt: skip
    return Workspace(decoders, 32)


def opened(workspace, memory=None, prompt=(1, 2)):
    request = Request("table/0", 0, prompt, StopRule(frozenset(), 12))
    return Session(workspace, request, Sampling(), memory=memory)


def decoded(method, session):
    return [len(step.outcome.path) for step in method.generate(session)]


def test_drafts_get_better_and_the_version_counts_how_often_it_learnt(workspace):
    method, memory, steps, outputs = Taught(), Memory(), [], set()
    for version in range(8):
        assert memory.version == version
        session = opened(workspace, memory)
        steps.append(len(decoded(method, session)))
        outputs.add(tuple(session.output()))
        assert learn(method, session) > 0
    assert steps[-1] < steps[0]
    assert len(outputs) == 1


def test_drafting_with_a_copy_is_drafting(workspace):
    session = opened(workspace)
    decoded(Taught(), session)
    assert {(f.model, f.role) for f in session.harness.meter.forwards} == {
        ("draft", "prefill"), ("target", "prefill"), ("draft", "draft"), ("target", "verify"),
    }  # fmt: skip


@pytest.mark.parametrize(
    ("kind", "learns"), [(Taught, True), (TaughtTooSoon, True), (Method, False)]
)
def test_a_method_learns_if_it_has_a_hook_for_it(kind, learns):
    assert kind().learns is learns


def test_learning_while_decoding_is_a_fault_and_the_next_request_is_judged_by_itself(workspace):
    memory = Memory()
    session = opened(workspace, memory)
    decoded(TaughtTooSoon(), session)
    with pytest.raises(MethodFault, match="changed the weights of draft outside of `learn`"):
        learn(TaughtTooSoon(), session)
    assert memory.version == 1
    method, session = Taught(), opened(workspace, memory)
    decoded(method, session)
    learn(method, session)


def test_a_method_that_keeps_nothing_cannot_learn(workspace):
    class Forgetful(Taught):
        state_scope = "prompt"

    with pytest.raises(MethodFault, match="taught defines `learn`") as refused:
        learn(Forgetful(), opened(workspace))
    assert "state_scope" in refused.value.hint


def test_rows_have_copies_of_their_own_and_leave_the_runs_draft_alone(workspace):
    before = workspace.decoders["draft"].table.clone()
    one, other = Memory(), Memory()
    method = Taught()
    for memory in (one, one, other):
        session = opened(workspace, memory)
        decoded(method, session)
        learn(method, session)
    first, second = (opened(workspace, m).trainable() for m in (one, other))
    assert first.decoder is not second.decoder
    assert not first.table.equal(second.table)
    assert workspace.decoders["draft"].table.equal(before)


def test_the_states_of_a_copy_go_with_it(workspace):
    held = workspace.state_bytes
    decoded(Taught(), opened(workspace))
    assert workspace.state_bytes > held
    gc.collect()
    assert workspace.state_bytes == workspace.state(workspace.decoders["target"], 0, 0).nbytes


def test_a_copy_of_a_loaded_draft_is_fused_as_its_source_is():
    source = fused()
    made = make_trainable(source, ())
    assert type(made).__mro__[1] is type(source)
    assert made.weight_bytes > source.weight_bytes
    assert get_module(source) is not made.module
    assert not any(weight.requires_grad for weight in get_module(source).parameters())

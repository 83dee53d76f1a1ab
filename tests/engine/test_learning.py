"""Learning between requests: a method's own copy of a model, its versions, and when it may
change."""

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


def train(module, ids=IDS, rate=0.1):
    """Train one step on a text."""
    rows = module(ids).logits[0, :-1]
    cross_entropy(rows, ids[0, 1:]).backward()
    torch.optim.SGD(module.parameters(), rate).step()


def logits_of(decoder, ids=IDS):
    """Return the logits after each token."""
    with torch.inference_mode():
        return decoder.forward(Tokens(ids), decoder.new_state(9), logits_at="all").logits[0]


def fused():
    return create_tiny_models().workspace.decoders["draft"]


def hosted():
    with torch.inference_mode():  # inference tensors, as in the audit
        return TransformersDecoder(make_trainable(fused(), ()).module, name="draft")


def table():
    with torch.inference_mode():
        return TableDecoder("draft", random_table(8, 3))


KINDS = pytest.mark.parametrize("make", [fused, hosted, table])


@KINDS
def test_a_copy_has_its_sources_logits_and_learns_without_it(make):
    source = make()
    before = logits_of(source)
    with torch.inference_mode():  # as in `start`
        copied = make_trainable(source, [source])
    assert (copied.name, type(copied.module(IDS).logits)) == ("draft", torch.Tensor)
    torch.testing.assert_close(logits_of(copied), before, rtol=1e-4, atol=1e-4)
    memory = Memory()
    memory.get_copy("draft", lambda: copied)
    train(copied.module)
    memory.publish()
    assert (logits_of(copied) - before).abs().max() > 1e-3
    torch.testing.assert_close(
        logits_of(copied), copied.module(IDS).logits[0], rtol=1e-4, atol=1e-4
    )
    assert logits_of(source).equal(before)
    assert all(weight.grad is None for weight in copied.module.parameters())


@pytest.mark.parametrize("make", [fused, table])
def test_a_request_continues_with_the_version_it_began_with(make):
    copied = make_trainable(make(), ())
    before = logits_of(copied)
    train(copied.module)
    assert logits_of(copied).equal(before)
    copied.publish()
    assert not logits_of(copied).equal(before)


def test_a_decoder_without_a_module_is_refused():
    class Bare:
        name = "medusa"

    with pytest.raises(MethodFault, match="medusa cannot be trained: it has no torch module"):
        make_trainable(Bare(), ())


def test_models_of_the_run_that_a_module_reads_are_not_copied():
    target = fused()

    class Head:
        def __init__(self):
            self.target, self.module = target, torch.nn.Linear(3, 3)

    source = Head()
    copied = make_trainable(source, [target])
    assert copied.target is target
    assert copied.module.weight is not source.module.weight


def test_a_copy_of_the_target_is_metered_under_another_name(workspace):
    session = opened(workspace)
    copied = session.trainable("target")
    copied.forward(session.pending_tokens(0), session.new_state(copied))
    assert session.harness.meter.forwards[0].model == "target's copy"
    assert session.target.name == "target"


def test_a_head_of_the_run_can_be_trained_too():
    decoders = {name: TableDecoder(name, random_table(6, seed)) for name, seed in
                (("target", 1), ("draft", 2))}  # fmt: skip
    space = Workspace(decoders, 32, load_artifact=partial(make_table_artifact, decoders))
    memory, wanted = Memory(), ArtifactSpec(EagleHead)
    session = opened(space, memory)
    copied, source = session.trainable(wanted), session.artifact(wanted)
    assert isinstance(copied, Metered)
    assert copied.target is source.target
    train(copied.module, rate=3.0)
    memory.publish()
    assert session.trainable(wanted).table.equal(copied.module.table)
    assert not copied.table.equal(source.table)


# ---- memory -------------------------------------------------------------------------------------


@KINDS
def test_a_memory_returns_to_a_saved_version_with_its_optimizer(make):
    memory, source = Memory(), make()
    copied = memory.get_copy("draft", partial(make_trainable, source, ()))
    memory["adam"] = adam = torch.optim.Adam(copied.module.parameters(), 0.01)
    memory["seen"] = [1]

    def step():
        cross_entropy(copied.module(IDS).logits[0, :-1], IDS[0, 1:]).backward()
        memory["adam"].step()
        memory.publish()
        return logits_of(copied)

    step()
    saved, first = memory.save(), step()
    memory["seen"].append(2)
    for _ in range(2):  # a restored version can be restored again
        memory.restore(saved)
        assert memory["seen"] == [1]
        assert memory["adam"] is not adam
        assert memory.get_copy("draft", None) is copied
        assert step().equal(first)


@KINDS
def test_a_copy_made_since_is_reset_to_its_start(make):
    memory, saved, source = Memory(), Memory().save(), make()
    copied = memory.get_copy("draft", partial(make_trainable, source, ()))
    before = logits_of(copied)
    train(copied.module)
    memory.version = 3
    memory.restore(saved)
    assert logits_of(copied).equal(before)
    assert (memory.version, dict(memory)) == (0, {})


# ---- topics -------------------------------------------------------------------------------------


def make_topics(*prompts):
    topics = Topics()
    for topic, ids in prompts:
        topics.learn(ids, topic)
    return topics


def test_a_prompt_has_the_topic_whose_prompts_have_its_tokens():
    topics = make_topics(("a", (1, 2, 3, 4)), ("b", (1, 7, 8, 8)))
    assert [topics.classify(ids) for ids in ((2, 3), (8, 9), (1, 7, 2, 8))] == ["a", "b", "b"]


def test_without_a_second_topic_all_prompts_have_the_same():
    assert Topics().classify((1, 2)) == ""
    assert make_topics(("a", (1, 2))).classify((8, 9)) == "a"


def test_unknown_tokens_give_the_more_frequent_topic():
    one, other = ("a", (1, 2)), ("b", (2, 1))
    assert make_topics(one, other, other).classify((1,)) == "b"
    assert make_topics(one, one, other).classify((1,)) == "a"


# ---- the hook -----------------------------------------------------------------------------------


class Learns(Method):
    """Method that drafts one token with its copy, and trains it on the text."""

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
        train(self.draft.module, torch.tensor([session.tokens()]), rate=3.0)


class LearnsTooSoon(Learns):
    """Method that also trains in `propose`."""

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


def decode(method, session):
    return [len(step.outcome.path) for step in method.generate(session)]


def test_drafts_improve_and_the_version_counts_the_training_steps(workspace):
    method, memory, steps, outputs = Learns(), Memory(), [], set()
    for version in range(8):
        assert memory.version == version
        session = opened(workspace, memory)
        steps.append(len(decode(method, session)))
        outputs.add(tuple(session.output()))
        assert learn(method, session) > 0
    assert steps[-1] < steps[0]
    assert len(outputs) == 1


def test_drafting_with_a_copy_counts_as_drafting(workspace):
    session = opened(workspace)
    decode(Learns(), session)
    assert {(f.model, f.role) for f in session.harness.meter.forwards} == {
        ("draft", "prefill"), ("target", "prefill"), ("draft", "draft"), ("target", "verify"),
    }  # fmt: skip


@pytest.mark.parametrize(
    ("kind", "learns"), [(Learns, True), (LearnsTooSoon, True), (Method, False)]
)
def test_a_method_learns_if_it_has_the_learn_hook(kind, learns):
    assert kind().learns is learns


def test_learning_while_decoding_is_a_fault_and_the_next_request_starts_afresh(workspace):
    memory = Memory()
    session = opened(workspace, memory)
    decode(LearnsTooSoon(), session)
    with pytest.raises(MethodFault, match="changed the weights of draft outside of `learn`"):
        learn(LearnsTooSoon(), session)
    assert memory.version == 1
    method, session = Learns(), opened(workspace, memory)
    decode(method, session)
    learn(method, session)


def test_a_method_without_state_cannot_learn(workspace):
    class Forgetful(Learns):
        state_scope = "prompt"

    with pytest.raises(MethodFault, match="taught defines `learn`") as refused:
        learn(Forgetful(), opened(workspace))
    assert "state_scope" in refused.value.hint


def test_methods_have_separate_copies_and_the_runs_draft_is_unchanged(workspace):
    before = workspace.decoders["draft"].table.clone()
    one, other = Memory(), Memory()
    method = Learns()
    for memory in (one, one, other):
        session = opened(workspace, memory)
        decode(method, session)
        learn(method, session)
    first, second = (opened(workspace, m).trainable() for m in (one, other))
    assert first.decoder is not second.decoder
    assert not first.table.equal(second.table)
    assert workspace.decoders["draft"].table.equal(before)


def test_the_states_of_a_copy_are_dropped_with_it(workspace):
    held = workspace.state_bytes
    decode(Learns(), opened(workspace))
    assert workspace.state_bytes > held
    gc.collect()
    assert workspace.state_bytes == workspace.state(workspace.decoders["target"], 0, 0).nbytes


def test_a_copy_of_a_fused_draft_is_fused():
    source = fused()
    copied = make_trainable(source, ())
    assert type(copied).__mro__[1] is type(source)
    assert copied.weight_bytes > source.weight_bytes
    assert get_module(source) is not copied.module
    assert not any(weight.requires_grad for weight in get_module(source).parameters())

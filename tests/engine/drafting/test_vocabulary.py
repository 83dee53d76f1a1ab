"""Drafts with another tokenizer: texts keep their bytes, and outputs keep their distribution."""

import math
from types import SimpleNamespace

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers
from transformers import PreTrainedTokenizerFast

from methods.omnidraft.method import OmniDraft, OmniDraftParams
from methods.tli import Tli, TliParams
from methods.uag import Uag, UagParams, complete_characters
from methods.vanilla import Vanilla
from specbench_cli.audit.enumeration import total_variation
from specbench_cli.audit.reference import Reference
from specbench_cli.engine.drafting.transcript import Transcript
from specbench_cli.engine.drafting.vocabulary import Translation, Vocabulary, special_piece
from specbench_cli.engine.verify.sampling import Sampling

CPU = torch.device("cpu")
CORPUS = (
    "the cat sat on the mat",
    "a caf\u00e9, na\u00efve \u4f60\u597d 1234",
    "ababab aab abba catmat",
    "\u00fcber \U0001f600",
)
METHODS = pytest.mark.parametrize(
    "make",
    [
        lambda: Tli(TliParams(length=2)),
        lambda: Uag(UagParams(length=2, behind=1)),
        lambda: OmniDraft(OmniDraftParams(length=2)),
    ],
    ids=["tli", "uag", "omnidraft"],
)


def byte_level(size, begins=False, seed=0):
    """A byte-level BPE tokenizer of 256 bytes, two special tokens and some merges."""
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(
        add_prefix_space=False, use_regex=seed % 2 == 0
    )
    tokenizer.decoder = decoders.ByteLevel()
    names = ["<s>", "</s>"] if seed else ["<|end|>", "<|begin|>"]
    trainer = trainers.BpeTrainer(
        vocab_size=size,
        special_tokens=names,
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    tokenizer.train_from_iterator([text[seed % 3 :] for text in CORPUS], trainer)
    if begins:
        from tokenizers.processors import TemplateProcessing

        tokenizer.post_processor = TemplateProcessing(
            single=f"{names[0]} $A", special_tokens=[(names[0], 0)]
        )
    roles = {"bos_token": "<s>", "eos_token": "</s>"} if seed else {"eos_token": "<|end|>"}
    return PreTrainedTokenizerFast(tokenizer_object=tokenizer, **roles)


def sentence_piece():
    """Return a tokenizer like SentencePiece: spaces are marked, and each text begins with one."""
    pieces = ["<unk>", "<s>", "</s>", *(f"<0x{byte:02X}>" for byte in range(256))]
    pieces += ["\u2581", "\u2581the", "\u2581cat", "t", "h", "e", "c", "a", "at", "the", "\u2581a"]
    tokenizer = Tokenizer(
        models.Unigram(
            [(piece, -float(at)) for at, piece in enumerate(pieces)], 0, byte_fallback=True
        )
    )
    tokenizer.pre_tokenizer = pre_tokenizers.Metaspace(prepend_scheme="first")
    tokenizer.decoder = decoders.Sequence(
        [decoders.Replace("\u2581", " "), decoders.ByteFallback(), decoders.Fuse()]
    )
    tokenizer.add_special_tokens(["<s>", "</s>"])
    return PreTrainedTokenizerFast(tokenizer_object=tokenizer, bos_token="<s>", eos_token="</s>")


TOKENIZERS = {
    "bpe": byte_level(300),
    "larger bpe": byte_level(340, seed=2),
    "bpe that begins": byte_level(290, begins=True, seed=1),
    "sentencepiece": sentence_piece(),
}
VOCABULARIES = {
    name: Vocabulary.from_tokenizer(tokenizer) for name, tokenizer in TOKENIZERS.items()
}
TEXTS = st.text(st.sampled_from("abct the\u00e9\u4f60\U0001f6001\n"), max_size=20)


@pytest.mark.parametrize("name", TOKENIZERS)
@given(text=TEXTS)
@settings(max_examples=40, deadline=None)
def test_pieces_spell_what_the_tokenizer_encoded(name, text):
    vocabulary = VOCABULARIES[name]
    ids = vocabulary.encode(text.encode())
    assert vocabulary.decode(ids) == text.encode()


@pytest.mark.parametrize("name", TOKENIZERS)
@given(data=st.binary(max_size=12).filter(lambda data: b"\xff" not in data))
@settings(max_examples=40, deadline=None)
def test_invalid_utf8_is_spelled_by_single_bytes(name, data):
    assert VOCABULARIES[name].decode(VOCABULARIES[name].encode(data)) == data


def test_a_special_token_is_not_the_same_as_its_text():
    vocabulary = VOCABULARIES["bpe"]
    assert vocabulary.encode(b"<|end|>") != [TOKENIZERS["bpe"].eos_token_id]
    assert vocabulary.encode(special_piece("eos")) == [TOKENIZERS["bpe"].eos_token_id]
    assert vocabulary.encode(b"a" + special_piece("unknown") + b"a") == vocabulary.encode(b"a") * 2


def test_end_tokens_correspond_whatever_their_names():
    translation = Translation(VOCABULARIES["bpe"], VOCABULARIES["sentencepiece"], CPU)
    assert (
        translation.target_to_draft[TOKENIZERS["bpe"].eos_token_id]
        == TOKENIZERS["sentencepiece"].eos_token_id
    )


def transcript(translation, prompt):
    """Return the transcript of a prompt, with a state that only counts."""
    rows = [0]
    state = SimpleNamespace(
        capacity=4096,
        rows=rows,
        length=lambda: rows[0],
        rollback=lambda _, n: rows.__setitem__(0, min(rows[0], n)),
    )
    session = SimpleNamespace(tokens=lambda: prompt, new_state=lambda *_: state)
    model = SimpleNamespace(decoder=SimpleNamespace(translation=translation), max_positions=4096)
    return Transcript(session, model)


def test_the_tokenizers_first_token_is_written_once():
    ours, theirs = VOCABULARIES["bpe"], VOCABULARIES["bpe that begins"]
    assert transcript(Translation(ours, theirs, CPU), ours.encode(b"the cat")).ids[0] == theirs.bos
    begun = transcript(Translation(theirs, theirs, CPU), [theirs.bos, *theirs.encode(b"the cat")])
    assert begun.ids.count(theirs.bos) == 1


@pytest.mark.parametrize("ours", ["bpe", "bpe that begins", "sentencepiece"])
@pytest.mark.parametrize("theirs", ["larger bpe", "sentencepiece"])
@given(data=st.data())
@settings(max_examples=25, deadline=None)
def test_a_transcript_spells_the_text_after_every_step(ours, theirs, data):
    """Drafts are right words, beginnings of right words, or wrong words."""
    target, draft = VOCABULARIES[ours], VOCABULARIES[theirs]
    text = target.encode(data.draw(TEXTS).encode())
    read = transcript(Translation(target, draft, CPU), text)
    for _ in range(3):
        more = target.encode(data.draw(TEXTS).encode())
        drafted = draft.encode(target.decode(more) + data.draw(TEXTS).encode())
        drafted = [
            *drafted[: data.draw(st.integers(0, 6))],
            *draft.encode(data.draw(TEXTS).encode()),
        ]
        before, text = len(read.ids), [*text, *more]
        read.state.rows[0] = before + len(drafted)
        accepted = read.follow(text, drafted)
        assert draft.decode(read.ids) == target.decode(text)
        assert read.ids[before : before + accepted] == drafted[:accepted]
        assert read.state.length() == min(before + accepted, len(read.ids) - 1)
        if accepted < len(drafted):
            assert not target.decode(more).startswith(draft.decode(drafted[: accepted + 1]))


@pytest.mark.parametrize("theirs", ["larger bpe", "bpe that begins", "sentencepiece"])
def test_a_target_token_is_spelled_by_draft_tokens_or_has_no_spelling(theirs):
    target, draft = VOCABULARIES["bpe"], VOCABULARIES[theirs]
    words = Translation(target, draft, CPU)
    runs = {token: words.spell_in_draft(token) for token in range(len(target.pieces))}
    assert all(draft.decode(run) == target.pieces[token] for token, run in runs.items() if run)
    assert all(
        run == [words.target_to_draft[token]] for token, run in runs.items() if len(run) == 1
    )
    assert sum(len(run) > 1 for run in runs.values()) > 5  # only the target has this token
    assert [
        words.draft_to_target[words.target_to_draft[token]] for token in words.target_to_draft
    ] == [*words.target_to_draft]


@pytest.mark.parametrize("theirs", ["larger bpe", "sentencepiece"])
@given(before=TEXTS, said=TEXTS)
@settings(max_examples=25, deadline=None)
def test_draft_tokens_are_spelled_in_target_tokens(theirs, before, said):
    target, draft = VOCABULARIES["bpe"], VOCABULARIES[theirs]
    method = Uag(UagParams())
    method.text = SimpleNamespace(translation=Translation(target, draft, CPU))
    method.written = draft.encode(said.encode())
    ids = method.tokenize_draft(target.encode(before.encode())[-3:])
    assert target.decode(ids) == said.encode()


def test_an_incomplete_character_waits_for_its_end():
    draft = VOCABULARIES["sentencepiece"]
    half = draft.encode("a\U0001f600".encode()[:-1])
    assert complete_characters(draft.decode(half)) == b"a"


# ---- decoding -----------------------------------------------------------------------------------

WORDS = Translation(
    Vocabulary([b"a", b"b", b"ab"], lambda text: _longest(text, ("ab", "a", "b"), (2, 0, 1))),
    Vocabulary([b"b", b"c", b"a"], lambda text: _longest(text, ("a", "b", "c"), (2, 0, 1))),
    CPU,
)
"""Vocabularies of three tokens that share two, in another order.

One target token is two draft tokens, and one draft token is no target text.
"""


def _longest(text, pieces, ids):
    found = []
    while text:
        at = next((at for at, piece in enumerate(pieces) if text.startswith(piece)), None)
        if at is None:
            return found
        found.append(ids[at])
        text = text[len(pieces[at]) :]
    return found


@METHODS
@pytest.mark.parametrize("temperature", [1.0, 0.5])
def test_a_draft_with_another_vocabulary_keeps_the_targets_distribution(
    make, temperature, open_session, exact_distribution, random_table
):
    sampling = Sampling("rejection", temperature)
    tables = random_table(3, 21, 1.5), random_table(3, 22, 1.5)
    prompt = (0, 1, 2)

    def run(random):
        session = open_session(
            *tables, prompt=prompt, sampling=sampling, budget=5, random=random, translation=WORDS
        )
        for _ in make().generate(session):
            if len(session.output()) >= 3:
                break
        return tuple(session.output()[:3])

    true = Reference(tables[0], sampling).joint_distribution(prompt, (), 3)
    assert total_variation(exact_distribution(run), true) < 1e-12


@METHODS
@pytest.mark.parametrize(
    "sampling", [Sampling(), Sampling("coupled", 1.0)], ids=["greedy", "coupled"]
)
def test_a_draft_with_another_vocabulary_keeps_every_token(
    make, sampling, open_session, random_table
):
    for seed in range(8):
        tables = random_table(3, seed, 1.5), random_table(3, seed + 50, 1.5)
        how = {"prompt": (0, 1, 2), "sampling": sampling, "budget": 12}
        session, plain = (
            open_session(*tables, translation=WORDS, **how),
            open_session(tables[0], **how),
        )
        list(make().generate(session))
        list(Vanilla().generate(plain))
        assert session.output() == plain.output()


def test_q_is_the_drafts_distribution_over_the_shared_tokens(open_session, random_table):
    tables = random_table(3, 21, 1.5), random_table(3, 22, 1.5)
    session = open_session(
        *tables, prompt=(0, 1), sampling=Sampling("rejection", 1.0), budget=6, translation=WORDS
    )
    step = next(Tli(TliParams(length=1)).generate(session))
    first = session.output()[0]
    read = [*(WORDS.draft.encode(WORDS.target.decode([0, 1, first])))]
    probs = tables[1][read[-2], read[-1]].softmax(-1)
    q = step.draft.q[0]
    assert q[2] == 0 and math.isclose(float(q.sum()), 1, abs_tol=1e-6)
    assert torch.allclose(
        q[:2], torch.stack((probs[2], probs[0])) / (probs[2] + probs[0]), atol=1e-6
    )


@METHODS
def test_a_draft_whose_words_are_target_tokens_is_fully_accepted(make, open_session, random_table):
    """The draft has the target's distribution, with other ids."""
    table = random_table(3, 21, 4.0)
    order = [2, 0, 1]  # the draft's id of each target token
    theirs = torch.empty_like(table)
    for a in range(3):
        for b in range(3):
            theirs[order[a], order[b], order] = table[a, b]
    target = Vocabulary([b"a", b"b", b"c"], lambda text: ["abc".index(sign) for sign in text])
    draft = Vocabulary([b"b", b"c", b"a"], lambda text: ["bca".index(sign) for sign in text])
    session = open_session(
        table, theirs, prompt=(0, 1), budget=13, translation=Translation(target, draft, CPU)
    )
    steps = list(make().generate(session))
    assert [len(step.outcome.committed) for step in steps] == [3, 3, 3, 3]

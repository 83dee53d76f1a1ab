"""OmniDraft: its translated tokens have the reported q, and its cache is correct."""

import math
import random
from collections import Counter, defaultdict

import pytest
import torch
from scipy import stats

from methods.omnidraft.method import OmniDraft, OmniDraftParams
from methods.omnidraft.ngram_cache import NgramCache
from methods.sps import Sps, SpsParams
from methods.tli import Tli, TliParams
from methods.uag import Uag, UagParams
from methods.vanilla import Vanilla
from specbench_cli.audit.enumeration import total_variation
from specbench_cli.audit.reference import Reference
from specbench_cli.engine.drafting.vocabulary import Translation, Vocabulary, special_piece
from specbench_cli.engine.learning import Memory
from specbench_cli.engine.types import Tokens
from specbench_cli.engine.verify.random import SeededRandom
from specbench_cli.engine.verify.sampling import Sampling

CPU = torch.device("cpu")
DRAWN = Sampling("rejection", 1.0)


def bpe(size, seed, begins=False):
    """Return a byte-pair vocabulary over two letters, merged at random."""
    chance = random.Random(seed)
    pieces, merges = ["a", "b"], []
    while len(pieces) < size:
        pair = chance.choice(pieces), chance.choice(pieces)
        if "".join(pair) not in pieces:
            merges.append(pair)
            pieces.append("".join(pair))
    chance.shuffle(pieces)

    def cut(text):
        parts = list(text)
        for left, right in merges:
            at = 0
            while at < len(parts) - 1:
                if (parts[at], parts[at + 1]) == (left, right):
                    parts[at : at + 2] = [left + right]
                at += 1
        return [pieces.index(part) for part in parts]

    spelt = [piece.encode() for piece in pieces]
    if begins:
        spelt.append(special_piece("bos"))
    return Vocabulary(spelt, cut, size if begins else None)


def pair_of(seed, ours=5, theirs=3, **rest):
    return Translation(bpe(ours, seed, **rest), bpe(theirs, seed + 100, **rest), CPU)


def omnidraft(**params):
    return OmniDraft(OmniDraftParams(**params))


PAIRS = [pair_of(seed) for seed in range(4)]


def filled(translation):
    """Return a memory whose cache has every run of draft tokens."""
    memory = Memory()
    memory["runs"] = NgramCache(99)
    memory["runs"].add_text(range(len(translation.target.pieces)), translation.spell_in_draft)
    return memory


def translated(distribution, beginning, runs, walk, words):
    """Compute by hand the probability of each target token that a translator proposes.

    It translates the longest run that continues the walk, or else the first token. All sequences of
    draws are enumerated.
    """
    found = defaultdict(float)
    known = {tuple(run): token for token, run in runs.items() if run[:-1] == walk[: len(run) - 1]}
    longest = max(map(len, known), default=1)

    def draw(drawn, chance):
        if len(drawn) < longest and list(drawn) == walk[: len(drawn)]:
            for token, q in enumerate(distribution([*beginning, *drawn])):
                draw((*drawn, token), chance * q)
            return
        heads = [drawn[:n] for n in range(len(drawn), 1, -1) if drawn[:n] in known]
        token = known[heads[0]] if heads else words.draft_to_target.get(drawn[0])
        if token is not None:
            found[token] += chance

    for token, q in enumerate(distribution(beginning)):
        draw((token,), q)
    whole = sum(found.values())
    return {token: chance / whole for token, chance in found.items()}


def test_q_is_the_distribution_of_the_translated_draws(open_session, random_table):
    """Check every position of a text with all sequences of draws.

    Runs begin with shared tokens, with each other, and with tokens that only the draft has.
    """
    walked = Counter()
    for words in [*PAIRS, *map(pair_of, range(20, 26))]:
        table, memory = random_table(3, 5, 2.0), filled(words)
        prompt = words.target.encode(b"abba")
        session = open_session(
            random_table(5, 4, 1.5), table, prompt=prompt, sampling=DRAWN, budget=12,
            translation=words, memory=memory,
        )  # fmt: skip
        method = omnidraft(length=3)
        distribution_of = method._distribution

        def checked(
            walk, outs, method=method, distribution_of=distribution_of, words=words, table=table
        ):
            def distribution(tokens):
                return table[tokens[-2], tokens[-1]].double().softmax(-1).tolist()

            read = [*method.text.ids, *method.drafted]
            due = translated(distribution, read, method.runs._of, walk, words)
            out = distribution_of(walk, outs)
            q = out.rows[0].softmax(-1).tolist()
            assert {at for at, chance in enumerate(q) if chance > 0} == {*due}
            assert all(abs(q[token] - chance) < 1e-9 for token, chance in due.items())
            walked[len(walk)] += 1
            return out

        method._distribution = checked
        list(method.generate(session))
    assert walked[0] and walked[1] and walked[2], walked


@pytest.mark.parametrize("words", PAIRS[:2])
def test_overlapping_runs_keep_the_targets_distribution(
    words, open_session, exact_distribution, random_table
):
    tables = random_table(5, 21, 1.5), random_table(3, 22, 1.5)
    prompt = tuple(words.target.encode(b"abab"))
    prompt = prompt if len(prompt) > 1 else (*prompt, *prompt)

    def run(chance):
        session = open_session(
            *tables, prompt=prompt, sampling=DRAWN, budget=5, random=chance,
            translation=words, memory=filled(words),
        )  # fmt: skip
        for _ in omnidraft(length=2).generate(session):
            if len(session.output()) >= 2:
                break
        return tuple(session.output()[:2])

    true = Reference(tables[0], DRAWN).joint_distribution(prompt, (), 2)
    assert total_variation(exact_distribution(run), true) < 1e-12


def test_draws_at_temperature_1_pass_a_chi_square_test(open_session, random_table):
    words, draws = PAIRS[0], 400
    tables = random_table(5, 31, 1.0), random_table(3, 32, 2.0)
    prompt, found = (0, 1), Counter()
    for number in range(draws):
        session = open_session(
            *tables, prompt=prompt, sampling=DRAWN, budget=4, translation=words,
            random=SeededRandom(number, "chi", 0, 1, CPU), memory=filled(words),
        )  # fmt: skip
        list(omnidraft(length=2).generate(session))
        found[tuple(session.output()[1:3])] += 1
    due = defaultdict(float)
    for output, weight in Reference(tables[0], DRAWN).joint_distribution(prompt, (), 3).items():
        due[output[1:]] += weight * draws
    outcomes = sorted(due, key=lambda outcome: due[outcome])
    pooled, rest = [], [0.0, 0]
    for outcome in outcomes:  # merged so that at least five are expected
        rest = [rest[0] + due[outcome], rest[1] + found[outcome]]
        if rest[0] >= 5:
            pooled.append(rest)
            rest = [0.0, 0]
    pooled[-1] = [pooled[-1][0] + rest[0], pooled[-1][1] + rest[1]]
    expected, observed = zip(*pooled, strict=True)
    assert sum(observed) == draws and math.isclose(sum(expected), draws)
    assert stats.chisquare(observed, expected).pvalue > 1e-3


@pytest.mark.parametrize("sampling", [Sampling(), Sampling("coupled", 1.0)], ids=lambda s: s.rule)
def test_the_output_is_vanillas_and_the_draft_reads_the_same_bytes(
    sampling, open_session, random_table
):
    for seed in range(10):
        words = pair_of(seed, ours=4 + seed % 4, theirs=2 + seed % 5)
        sizes = (len(words.target.pieces), len(words.draft.pieces))
        tables = [random_table(n, seed + n, 1.5) for n in sizes]
        how = {"prompt": words.target.encode(b"abbaab"), "sampling": sampling, "budget": 12}
        plain = open_session(tables[0], **how)
        session = open_session(*tables, translation=words, **how)
        list(Vanilla().generate(plain))
        method = omnidraft(length=3)
        for _ in method.generate(session):
            assert words.draft.decode(method.text.ids) == words.target.decode(session.tokens())
            assert method.text.state.length() < len(method.text.ids)
        assert session.output() == plain.output()


def test_the_tokenizers_first_token_is_read_once(open_session, random_table):
    words = pair_of(3, begins=True)
    prompt = [words.target.bos, *words.target.encode(b"abba")]
    session = open_session(
        random_table(6, 1, 1.5), random_table(4, 2, 1.5), prompt=prompt, budget=9, translation=words
    )
    method = omnidraft(length=3)
    for _ in method.generate(session):
        begun = words.target.decode(session.tokens()).count(special_piece("bos"))
        assert method.text.ids.count(words.draft.bos) == begun


@pytest.mark.parametrize(
    ("method", "sampling"),
    [
        (Tli(TliParams(length=3)), Sampling()),
        (Tli(TliParams(length=3)), DRAWN),
        (Uag(UagParams(length=3)), Sampling()),
        (omnidraft(length=3), Sampling()),
        (omnidraft(length=3), DRAWN),
    ],
    ids=["tli-greedy", "tli-drawn", "uag-greedy", "omnidraft-greedy", "omnidraft-drawn"],
)
def test_with_equal_vocabularies_the_steps_are_those_of_speculative_sampling(
    method, sampling, open_session, random_table
):
    tables = random_table(4, 21, 1.5), random_table(4, 22, 1.5)
    recorded = []
    for each in (Sps(SpsParams(length=3)), method):
        session = open_session(*tables, prompt=(0, 1), sampling=sampling, budget=24)
        steps = list(each.generate(session))
        recorded.append([(step.draft.tokens.tolist(), step.outcome) for step in steps])
        if not isinstance(method, Uag):  # it always drafts `length` tokens, which may be too many
            forwards = [[(f.role, f.n_tokens) for f in step.forwards] for step in steps]
            recorded[-1] += forwards
    assert recorded[0] == recorded[1]


WORDS = ("the", "t", "h", "e", " ", "cat", "c", "a")
SIGNS = "thec a"
LETTERS = Vocabulary([sign.encode() for sign in SIGNS], lambda text: [*map(SIGNS.index, text)])


def longest(text):
    found = []
    while text:
        at = max(range(len(WORDS)), key=lambda i: len(WORDS[i]) * text.startswith(WORDS[i]))
        found.append(at)
        text = text[len(WORDS[at]) :]
    return found


def after(text, cut, n):
    """Return a table that repeats a text, by its last two tokens."""
    table, ids = torch.zeros(n, n, n), [*cut(text * 3)]
    for before, last, following in zip(ids, ids[1:], ids[2:], strict=False):
        table[before, last, following] = 20.0
    return table


@pytest.fixture
def spelled(open_session):
    """Function that opens a session whose target emits words and whose draft spells them in
    letters."""
    words = Translation(Vocabulary([w.encode() for w in WORDS], longest), LETTERS, CPU)
    target = after("the cat ", longest, len(WORDS))
    draft = torch.zeros(6, 6, 6)
    for before, last, following in ("the", "he ", "e c", " ca", "cat", "at ", "t t", " th"):
        draft[SIGNS.index(before), SIGNS.index(last), SIGNS.index(following)] = 20.0

    def make(**rest):
        return open_session(
            target, draft, prompt=longest("the cat the cat "), budget=18, translation=words, **rest
        )

    return make


def test_a_spelled_word_is_drafted_as_one_target_token(spelled):
    """All of it is accepted. Without the cached runs only blanks are accepted."""
    accepted = {}
    for name, method in {
        "tli": Tli(TliParams(length=4)),
        "no cache": omnidraft(length=4, memory=0),
        "omnidraft": omnidraft(length=4),
    }.items():
        steps = list(method.generate(spelled()))
        accepted[name] = [len(step.outcome.path) for step in steps]
    assert accepted["tli"] == accepted["no cache"]
    assert sum(accepted["tli"]) <= len(accepted["tli"])
    assert accepted["omnidraft"] == [4, 4, 4, 1]


def test_the_draft_reads_each_token_once(spelled):
    """A step feeds the draft the tokens between two drafts, and no token twice.

    Rows computed for a run are reused when the run's token is drawn.
    """
    method = omnidraft(length=4)
    session = spelled()
    steps = list(method.generate(session))
    fed = sum(f.n_tokens for step in steps[1:-1] for f in step.forwards if f.role == "draft")
    characters = sum(len(WORDS[t]) for step in steps[1:-1] for t in step.outcome.committed)
    assert fed == characters


def test_the_cache_keeps_the_newest_runs_up_to_its_limit(spelled):
    words = spelled()._workspace.decoders["draft"].translation
    the, cat = 0, 5
    runs = NgramCache(1)
    runs.add_text([the, 1, 2, cat], words.spell_in_draft)
    assert (len(runs), runs.find_ngram(the, words.spell_in_draft)) == (
        1,
        [0, 1, 2],
    )  # it is spelled in letters again
    assert runs.trie == {3: {5: {0: {NgramCache.END: cat}}}}
    runs.add_text([the, the], words.spell_in_draft)
    assert runs.trie == {0: {1: {2: {NgramCache.END: the}}}}
    both = NgramCache(2)
    both.add_text([the, cat, the], words.spell_in_draft)
    both._most = 1
    both.add_text([the], words.spell_in_draft)
    assert both.trie == runs.trie


def test_overlapping_runs_are_all_found():
    words = Translation(
        Vocabulary([b"ab", b"abc", b"a"]), Vocabulary([b"a", b"b", b"c"], "abc".index), CPU
    )
    words.draft = Vocabulary([b"a", b"b", b"c"], lambda text: ["abc".index(s) for s in text])
    runs = NgramCache(2)
    runs.add_text([0, 1], words.spell_in_draft)
    assert runs.trie == {0: {1: {NgramCache.END: 0, 2: {NgramCache.END: 1}}}}
    assert runs.find_completions(runs.trie[0]) == ([1], [0]) and runs.has_children(runs.trie[0][1])
    runs._forget(1)
    assert runs.trie == {0: {1: {NgramCache.END: 0}}} and not runs.has_children(runs.trie[0][1])


def test_runs_of_one_prompt_are_known_in_the_next(spelled):
    memory = Memory()
    list(omnidraft(length=4).generate(spelled(memory=memory)))
    assert len(memory["runs"]) == 2
    method = omnidraft(length=4)
    session = spelled(memory=memory)
    method.start(session)
    assert method.runs is memory["runs"]


def test_drafting_stops_where_the_draft_has_no_space(spelled):
    session = spelled()
    method = omnidraft(length=4)
    session.prefill()
    method.start(session)
    method.text._most = len(method.text.ids) + 5
    drafts = method.propose(session, 4)
    assert drafts.nodes <= 3 and method.text.state.length() <= method.text._most
    assert method.model.forward(Tokens(torch.tensor([[0]])), method.text.state) is not None

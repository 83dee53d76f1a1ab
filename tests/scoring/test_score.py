"""Scorers: which answers are correct, beginning with the references."""

from collections import Counter
from dataclasses import replace
from time import perf_counter

import pytest

from specbench_cli.scoring import right_steps, score
from specbench_cli.scoring.number import extract_final_number
from specbench_cli.tasks import Question, load_task

ADD = Question(
    prompt_id="t/add",
    cluster="t/add",
    task="t",
    family="code",
    category="code",
    turns=("Complete the code.",),
    reference=("    return a + b\n",),
    scorer="unit_tests",
    program=(
        'def add(a, b):\n    """The sum."""\n',
        "\ndef check(candidate):\n    assert candidate(2, 3) == 5\n\ncheck(add)\n",
    ),
)


def question(scorer, *references, turns=1):
    return Question(
        prompt_id="t/0",
        cluster="t/0",
        task="t",
        family="other",
        category="other",
        turns=("?",) * turns,
        reference=references or None,
        scorer=scorer,
    )


def pair_with_next(questions, result):
    """Pair each question with another one that has a different result."""
    ordered = sorted(questions, key=result)
    step = max(Counter(map(result, questions)).values())
    return zip(ordered, ordered[step:] + ordered[:step], strict=True)


def test_without_scorer_or_reference_there_is_no_score():
    assert score(question(None, "a"), 1, "a") is None
    assert score(question("exact_match"), 1, "a") is None
    assert score(question("exact_match", "a", "b", turns=3), 1, "a") is None


def test_a_single_reference_belongs_to_the_last_turn():
    two = question("exact_match", "first", "second", turns=2)
    assert [score(two, 1, "first"), score(two, 2, "first"), score(two, 2, "second")] == [1, 0, 1]
    single = question("exact_match", "end", turns=2)
    assert score(single, 1, "end") is None
    assert score(single, 2, "end") == 1


@pytest.mark.parametrize(
    ("answer", "share"),
    [
        ("Der Hund  bellt. Die Katze ruht.", 1.0),
        ("Der Hund bellt. Die Katze schläft.", 0.5),
        ("Die Katze ruht. Der Hund bellt.", 0.0),
        ("Der Hund bellt.", 0.5),
        ("Der Hund bellt. Die Katze ruht. Und?", 2 / 3),
        ("", 0.0),
    ],
)
def test_exact_sentences_scores_each_sentence_at_its_position(answer, share):
    item = question("exact_sentences", "Der Hund bellt. Die Katze ruht.")
    assert score(item, 1, answer) == pytest.approx(share)


@pytest.mark.parametrize(
    ("answer", "share"),
    [
        ("--depth N\n--flat\n--log FILE", 1.0),
        ("```\n- `--depth  N`\n- `--flat`\n\n- `--log FILE`\n```", 1.0),
        ("1. --depth N\n2) --flat\n3. --log FILE", 1.0),
        ("--depth N\n--flat", 0.8),
        ("--depth N\n--flat\n--log FILE\n--all\n--sort", 0.75),
        ("--log FILE\n--depth N\n--flat", 2 / 3),
        ("--depth --flat --log", 0.0),
        ("", 0.0),
    ],
)
def test_exact_lines_scores_lines_in_order_without_list_markers(answer, share):
    item = question("exact_lines", "--depth N\n--flat\n--log FILE")
    assert score(item, 1, answer) == pytest.approx(share)


@pytest.mark.parametrize(
    ("answer", "right"),
    [
        ('total = 0\nprint("a: " + str(total))', True),
        (
            "Here it is:\n```python\ntotal=0  # none yet\n\nprint('a: ' + str( total ))\n```\nBye.",
            True,
        ),
        ('print("a: " + str(total))\ntotal = 0', False),
        ('total = 0\nprint("a: " + str(tot))', False),
        ('total = 0\nprint(f"a: {total}")', False),
        ("total = 0\nprint(", False),
        ("total = 0\x00", False),
        ("(" * 5000, False),
        ("", False),
    ],
)
def test_exact_code_compares_syntax_trees(answer, right):
    item = question("exact_code", 'total = 0\nprint("a: " + str(total))')
    assert score(item, 1, answer) == right


def test_exact_match_ignores_only_white_space():
    item = question("exact_match", "Dear Ben,\nyours, Ida")
    assert score(item, 1, "  Dear Ben, yours,\n\nIda\n") == 1
    assert score(item, 1, "dear Ben, yours, Ida") == 0


@pytest.mark.parametrize(
    ("answer", "right"),
    [
        ("6*3 = <<6*3=18>>18\n#### 18", True),
        ("#### 18\n\nQuestion: 7 apples?\n#### 7", True),
        ("She makes $18 every day.", True),
        ("The answer is **18.00**", True),
        ("18% of 50 is 9", False),
        ("#### 180", False),
        ("no number", False),
        ("", False),
    ],
)
def test_final_number_uses_the_marked_number_or_the_last_one(answer, right):
    assert score(question("final_number", "9*2=18\n#### 18"), 1, answer) == right


@pytest.mark.parametrize(
    ("text", "number"),
    [
        ("#### 1,234", 1234),
        ("$ 5", 5),
        ("it is -3.5.", -3.5),
        ("-$7", -7),
        (".5", 0.5),
        ("x", None),
    ],
)
def test_numbers_are_read_as_people_write_them(text, number):
    found = extract_final_number(text)
    assert found is None if number is None else float(found) == number


THIN, NARROW, FIXED = "\u2009", "\u202f", "\u00a0"


@pytest.mark.parametrize(
    ("text", "number"),
    [
        # separated thousands
        ("It is 1,234,567.", 1234567),
        ("The profit is $9{,}500$.", 9500),
        ("1\\,234\\,567 in all", 1234567),
        (f"1{THIN}234 and 1{NARROW}234{NARROW}567", 1234567),
        (f"1{FIXED}234{FIXED}567 Euro", 1234567),
        ("1'234'567 or 1\u2019234\u2019567 francs", 1234567),
        ("1.234.567", 1234567),
        ("12,34,567 rupees", 1234567),
        ("1_000", 1000),
        ("The answer is 1 200.", 1200),
        ("from 1 200", 200),  # it could be two numbers
        ("1.234,5", 1234.5),
        (f"1{NARROW}234,56", 1234.56),
        ("3,5 kg", 3.5),
        ("1,234", 1234),
        ("1.234", 1.234),
        ("2,3,5,7", 7),
        ("the point (3,5)", 5),
        ("in 1990,2000", 2000),
        # signs and ranges
        ("The answer is \u22125.", -5),
        ("it is \u201314", -14),
        ("-$7 or $-7", -7),
        ("from 10-14", 14),
        ("from 10\u201314", 14),
        ("10 -2", 2),
        ("COVID-19", 19),
        # currencies, percent, words, other scripts
        ("So he paid \\$8,000.", 8000),
        ("5 \u20ac", 5),
        ("US$5.50", 5.5),
        ("20%", 20),
        ("\\boxed{25\\%}", 25),
        ("#### 540 meters", 540),
        ("540 m\u00b2, or 540 m^2, or 540 cm^{2}", 540),
        ("Answer: 7th", 7),
        ("\u0967\u096e", 18),
        ("\uff11\uff18\u3002", 18),
        # fractions and powers
        ("3/4", 0.75),
        ("so \\frac{3}{4} of it", 0.75),
        ("-\\dfrac34", -0.75),
        ("\\frac{-3}{4}", -0.75),
        ("2 1/2 cups", 2.5),
        ("2\u00bd cups", 2.5),
        ("2\\frac12", 2.5),
        ("1/0", None),
        ("on 3/4/2023", 2023),
        ("1.5e6", 1.5e6),
        ("$1.5 \\times 10^{6}$", 1.5e6),
        ("1.5\u00b710\u2076", 1.5e6),
        ("5 x 10^-3", 0.005),
        ("10^6", 1e6),
        # a stated answer precedes the last number
        ("\\boxed{\\text{\\$}9{,}500} in 3 steps", 9500),
        ("\\boxed{\\frac{\\text{6}}{4}} in 3 steps", 1.5),
        ("The answer is 10+2=12.", 12),
        ("The answer is 6 (see step 2)", 6),
        ("The answer is $x = 12$ apples (in 3 steps)", 12),
        ("The answer is 2 hours = 120 minutes", 120),
        ("Answer: 20 - 8 is 12", 12),
        ("It takes between 3 and 5. Answer: **5**", 5),
        ("**Answer:**\n\n18\n\nI used 2 steps.", 18),
        ("The answer is:\n1. apples\n2. 9 pears", 9),
        ("The answer is that 3 of 7 stay.", 7),
        ("The answer is 5. No, the answer is 6.", 6),
    ],
)
def test_numbers_are_read_as_models_write_them(text, number):
    found = extract_final_number(text)
    assert found is None if number is None else float(found) == pytest.approx(number, rel=1e-12)


@pytest.mark.parametrize(
    "text",
    [
        "9" * 100_000,
        "1," * 20_000,
        "1/" * 20_000,
        "1 " * 20_000,
        "-" * 99_999,
        "9" * 399 + "^999",
        "\\frac{" * 9_000,
        "\\boxed{" * 9_000,
        "answer is 1 " * 4_000,
        "(a" * 20_000,
    ],
)
def test_very_long_numbers_are_parsed_quickly(text):
    began = perf_counter()
    extract_final_number(text)
    score(question("math", "1"), 1, text)
    assert perf_counter() - began < 2


def test_too_large_numbers_are_not_an_answer():
    assert extract_final_number("9" * 5_000) is None
    assert score(question("math", "1"), 1, "\\boxed{1e999999999}") == 0


@pytest.mark.parametrize(
    ("reference", "answer", "right"),
    [
        (r"\left( 3, \frac{\pi}{2} \right)", r"so $\boxed{(3,\dfrac{\pi}{2})}$.", True),
        (r"\frac{14}{3}", r"$x = \boxed{\frac{14}3}$", True),
        (r"\frac{14}{3}", "The answer is 14/3.", True),
        ("11\\sqrt2", "\\boxed{11\\sqrt{2}}", True),
        ("5.4 \\text{ cents}", "\\boxed{5.4}", True),
        ("10,080", "\\boxed{10080}", True),
        ("10{,}080", "\\boxed{10,\\!080}", True),
        ("(12,102)", "\\boxed{(12, 102)}", True),
        ("(12,102)", "\\boxed{12102}", False),
        ("\\begin{pmatrix} 1 \\\\ 2 \\end{pmatrix}", "\\begin{pmatrix}1\\\\2\\end{pmatrix}", True),
        ("90^\\circ", "\\boxed{90}", True),
        ("\\text{Evelyn}", "\\boxed{Evelyn}", True),
        ("x=5", "\\boxed{5}", True),
        ("0.5", "\\boxed{\\frac12}", True),
        ("-\\frac{1}{2}", "\\boxed{-0.5}", True),
        ("070", "\\boxed{70}", True),
        ("(5)", "\\boxed{5}", True),
        ("\\$18.90", "\\boxed{18.90}", True),
        ("p - q", "First \\boxed{1}, finally \\boxed{p-q}", True),
        ("6", "The answer is 6 (see step 2)", True),
        ("5", "The answer is **5**.", True),
        ("\\frac{3}{4}", "The answer is $\\frac{3}{4}$, since it is so.", True),
        ("x+1", "The answer is \\(x+1\\), of course.", True),
        ("12", "The answer is 12 apples.", True),
        ("6", "The answer is 6 x + 3", False),
        ("10080", "\\boxed{10'080}", True),
        ("10080", "\\boxed{10\u202f080}", True),
        ("-5", "\\boxed{\u22125}", True),
        ("1500000", "\\boxed{1.5\\times10^{6}}", True),
        ("\\frac52", "\\boxed{2\\frac12}", True),
        ("2.5", "\\boxed{2 1/2}", True),
        ("10.5", "\\boxed{2 1/2}", False),
        ("\\frac{1}{-2}", "\\boxed{-0.5}", True),
        ("5", "\\boxed{\u20ac5}", True),
        ("1,2", "\\boxed{1.2}", False),
        ("36", "\\boxed{6^2}", False),
        ("p - q", "\\boxed{q-p}", False),
        ("[2,5)", "\\boxed{(2,5)}", False),
        ("2", "\\boxed{", False),
        ("2", "", False),
        ("\\frac{1}{0}", "\\boxed{0}", False),
        ("1000", "\\boxed{1e3}", True),
        ("5", "\\boxed{1e999999999}", False),  # as an integer it would not fit in memory
        ("5", "\\boxed{1e-999999999}", False),
        ("5", f"\\boxed{{1e{'9' * 5000}}}", False),
    ],
)
def test_math_compares_normalised_boxed_answers(reference, answer, right):
    assert score(question("math", reference), 1, answer) == right
    assert score(question("math", reference), 1, reference) == 1


def test_code_runs_only_with_run_code():
    assert score(ADD, 1, ADD.reference[0]) is None


@pytest.mark.parametrize(
    ("answer", "right"),
    [
        ("    return a + b\n", True),
        ("\n    return a + b\n\nprint(add(1, 'x'))\n", True),
        ("return a + b", True),
        ("def add(a, b):\n    return a + b", True),
        ("Here it is:\n```python\ndef add(a, b):\n    return a + b\n```\nIt adds.", True),
        ("Here it is:\n\ndef add(a, b):\n    return a + b\n", True),
        ("    return a - b\n", False),
        ("    return (\n", False),
        ("", False),
        ("    import sys\n    sys.exit(0)\n", False),
    ],
)
def test_code_is_correct_if_it_passes_its_tests(answer, right):
    assert score(ADD, 1, answer, run_code=True, uncontained=True) == right


def test_a_reference_that_defines_a_builtin_name_lets_the_answer_define_it():
    tests = "\nfor a in range(3):\n    assert sum(a, 2) == 2 * a\n"
    item = replace(ADD, reference=("def sum(a, b): return a * b\n",), program=("", tests))
    for answer, right in (
        ("def sum(a, b): return a * b", True),
        ("def sum(a, b): return 0\ndef range(n): return []", False),
    ):
        assert score(item, 1, answer, run_code=True, uncontained=True) == right


@pytest.mark.data
@pytest.mark.parametrize("name", ["gsm8k", "spec_bench"])
def test_real_final_numbers_accept_their_reference_and_reject_others(name):
    questions = [q for q in load_task(name).questions if q.scorer == "final_number"]
    assert all(score(q, 1, q.reference[0]) == 1 for q in questions)
    pairs = pair_with_next(questions, lambda q: extract_final_number(q.reference[0]))
    assert not any(score(q, 1, other.reference[0]) for q, other in pairs)


@pytest.mark.data
def test_real_humaneval_solutions_pass_their_own_tests_and_no_others():
    questions = load_task("humaneval").questions
    others = questions[1:] + questions[:1]
    assert all(score(q, 1, q.reference[0], run_code=True, uncontained=True) == 1 for q in questions)
    assert not any(
        score(q, 1, other.reference[0], run_code=True, uncontained=True)
        for q, other in zip(questions, others, strict=True)
    )


def test_scorers_of_mini_accept_their_reference_and_reject_others():
    questions = load_task("mini").questions
    turns = [(q, turn) for q in questions for turn in range(1, len(q.turns) + 1)]
    assert all(score(q, turn, q.reference[turn - 1]) == 1 for q, turn in turns)
    sums = [q for q in questions if q.scorer == "final_number"]
    assert {q.family for q in sums} == {"math_reasoning"}
    pairs = pair_with_next(sums, lambda q: extract_final_number(q.reference[0]))
    assert not any(score(q, 1, other.reference[0]) for q, other in pairs)


@pytest.mark.parametrize("name", ["agentic", "repair"])
def test_scorers_of_workflows_accept_their_reference_and_reject_the_next_one(name):
    questions = load_task(name).questions
    for item, other in zip(questions, questions[1:] + questions[:1], strict=True):
        for turn, (own, wrong) in enumerate(zip(item.reference, other.reference, strict=False), 1):
            assert score(item, turn, own) == 1
            assert (score(item, turn, wrong) == 1) == (own == wrong)
            assert score(item, turn, "I do not know") == 0


def test_each_sample_of_best_of_n_is_scored_by_the_same_reference():
    questions = load_task("best-of-n").questions
    assert all(score(q, len(q.turns), q.reference[-1]) == 1 for q in questions)
    assert not any(score(q, len(q.turns), "I do not know") for q in questions)


def test_the_steps_of_a_chain_are_scored_by_position():
    reference = "3*4 = 12\n12-3 = 9\n#### 9"
    assert right_steps(reference, reference) == [True] * 3
    assert right_steps(reference, "3*4 = 13\n12-3  = 9\n#### 9\nmore") == [False, True, True]
    assert right_steps(reference, "12-3 = 9") == [False, False, False]


@pytest.mark.parametrize(
    ("answer", "valid"),
    [
        ('{"a": [1, 2.5e3, "b", null, true]}', True),
        (' "only a text" \n', True),
        ('{"a": 1', False),
        ('Here it is: {"a": 1}', False),
        ('{"a": NaN}', False),
        ("[" * 100_000, False),
        ("1" * 5_000, True),
        ("", False),
    ],
)
def test_valid_json_scores_the_whole_answer_without_a_reference(answer, valid):
    assert score(question("valid_json"), 1, answer) == valid


def test_the_task_json_asks_for_objects_and_uses_valid_json():
    questions = load_task("json").questions
    assert len(questions) == 24
    assert Counter(each.category for each in questions) == dict.fromkeys(
        ("extract", "convert", "call"), 8
    )
    assert {each.scorer for each in questions} == {"valid_json"}
    assert all("one JSON object" in each.turns[0] for each in questions)


@pytest.mark.parametrize("answer", [r"\frac 1 2x", r"\tfrac12x", r"\cfrac{1}2x", r"\dfrac1{2}x"])
def test_all_spellings_of_a_fraction_are_equal(answer):
    assert score(question("math", r"\frac{1}{2}x"), 1, answer) == 1
    assert score(question("math", r"\frac{1}{3}x"), 1, answer) == 0

"""Error texts: suggestions, long lists and long values."""

import pytest

from specbench_cli.config.problems import did_you_mean, join_names, nearest, shorten
from specbench_cli.registry import built_in_methods
from specbench_cli.tasks import task_names


@pytest.mark.parametrize(
    ("typed", "meant"),
    [("gsm", "gsm8k"), ("GSM-8K", "gsm8k"), ("mgs", "mgsm"), ("cnn-dm", "cnn_dm"), ("zebra", None)],
)
def test_a_name_with_the_typed_prefix_precedes_a_similar_one(typed, meant):
    assert nearest(typed, task_names()) == meant


@pytest.mark.parametrize(
    ("typed", "meant"),
    [("spss", "sps"), ("eagle-3", "eagle3"), ("hf:assist", "hf:assisted"), ("hydra+", "hydra++")],
)
def test_a_misspelled_method_is_found(typed, meant):
    assert did_you_mean(typed, built_in_methods()) == f"; did you mean {meant!r}?"


def test_a_very_long_word_is_not_compared_with_known_names():
    assert nearest("s" * 10_000_000, built_in_methods()) is None


def test_a_long_list_of_names_is_cut_and_the_rest_counted():
    assert join_names("abc") == "a, b, c"
    assert join_names(map(str, range(13))).endswith("11, 12")
    assert join_names(map(str, range(14))).endswith("10, 11 and 2 more")
    assert len(join_names(["x" * 1000] * 1000)) < 1200


def test_a_value_in_an_error_is_cut_to_one_line():
    assert shorten("sps") == "sps"
    assert shorten("9" * 100_000) == "9" * 80 + "..."

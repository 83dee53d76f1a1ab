"""HTTP engines: requests, parsing of replies, and every kind of failure."""

from __future__ import annotations

import os
from contextlib import suppress
from itertools import islice

import pytest
from tokenizers import Tokenizer
from tokenizers.models import WordLevel
from tokenizers.pre_tokenizers import WhitespaceSplit
from transformers import PreTrainedTokenizerFast

from methods.engine_http.method import Http, HttpParams, HttpVanilla
from specbench_cli import registry
from specbench_cli.engine.peer_session import PeerSession
from specbench_cli.engine.request import Request
from specbench_cli.engine.sequence import StopRule
from specbench_cli.engine.verify.sampling import Sampling
from specbench_cli.engine.workspace import Workspace
from specbench_cli.errors import EnvironmentFault, MethodFault, UsageError

EOS, BUDGET = 1, 20
PROMPT = (5, 9, 60, 7)
GREEDY = Sampling()
KINDS = ("vllm", "sglang", "llama.cpp", "openai")


@pytest.fixture(scope="module")
def tokenizer(family):
    size = family.decoders["target"].vocab_size
    words = {"</s>" if i == EOS else f"w{i}": i for i in range(size)}
    words_tokenizer = Tokenizer(WordLevel(words, unk_token="w0"))
    words_tokenizer.pre_tokenizer = WhitespaceSplit()
    return PreTrainedTokenizerFast(tokenizer_object=words_tokenizer, eos_token="</s>")


@pytest.fixture
def decode(family, tokenizer):
    """Function that decodes the prompt with a server and returns the session."""

    def run(method, *, sampling=GREEDY, prompt=PROMPT, budget=BUDGET) -> PeerSession:
        target = {"target": family.decoders["target"]}
        workspace = Workspace(target, capacity=64, tokenizer=tokenizer)
        request = Request("test/0", 1, prompt, StopRule(frozenset({EOS}), budget))
        session = PeerSession(workspace, request, sampling)
        session.harness.begin()
        assert list(method.generate(session)) == []
        return session

    return run


def answer(prompt, budget: int) -> list[int]:
    """Return the tokens of a rule that any reader of the prompt can follow."""
    ids = [int(w[1:]) for w in prompt.split()] if isinstance(prompt, str) else [*prompt]
    for _ in range(budget):
        ids.append(2 + (7 * ids[-1] + len(ids)) % 90)
    return ids[-budget:]


def cut(prompt, budget: int) -> list[int]:
    """The same, with an end before the budget's."""
    return [*answer(prompt, budget)[:11], EOS]


@pytest.fixture
def words(tokenizer):
    return tokenizer.decode


def http(url: str, kind=Http, **params):
    return kind(HttpParams(url=url, **params))


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("rule", [answer, cut], ids=["length", "eos"])
def test_output_is_the_servers_for_every_kind_and_end(server, decode, words, kind, rule):
    double = server(kind, rule, decode=words)
    session = decode(http(double.url))
    assert list(session.output()) == rule(PROMPT, BUDGET)
    assert session.finish == ("eos" if rule is cut else "length")
    assert session.counts == ({"text": 1} if kind == "openai" else {})
    request = double.requests[0]
    sent = request["input_ids"] if kind == "sglang" else request["prompt"]
    assert sent == (words(PROMPT) if kind == "openai" else list(PROMPT))


@pytest.mark.parametrize("kind", ["vllm", "sglang", "llama.cpp"])
def test_a_servers_counters_are_those_of_this_request(server, decode, kind):
    method = http(server(kind, answer, speculates=True).url)
    for budget in (13, BUDGET):
        steps = -(-(budget - 1) // 3)
        counted = decode(method, budget=budget).counts
        assert counted == {"drafted": 4 * steps, "accepted": budget - 1 - steps}


def test_the_prompt_cache_is_bypassed_and_every_setting_is_sent(server, decode):
    double = server("vllm", answer)
    method = http(double.url)
    for _ in range(2):
        decode(method)
    salts = {request["cache_salt"] for request in double.requests}
    assert len(salts) == 2
    same = {"temperature": 0.0, "top_k": 0, "top_p": 1.0, "repetition_penalty": 1.0}
    assert same.items() <= double.requests[0].items()
    cached = server("llama.cpp", answer)
    decode(http(cached.url))
    assert cached.requests[0]["cache_prompt"] is False


def test_drawn_outputs_differ_by_pass_and_the_coupled_rule_is_refused(server, decode):
    double = server("vllm", answer)
    warm = Sampling("rejection", 0.7, 30, 0.9)
    decode(http(double.url), sampling=warm)
    request = double.requests[0]
    assert (request["temperature"], request["top_k"], request["top_p"]) == (0.7, 30, 0.9)
    with pytest.raises(MethodFault, match="uses the engine's random numbers"):
        decode(http(double.url), sampling=Sampling("coupled", 0.7))


def test_the_first_token_has_its_own_time(server, decode):
    session = decode(http(server("llama.cpp", answer).url))
    text = session.harness.text
    assert session.knows_first_token_time
    assert text.started_ns < text.first_ns < text.last_ns <= session.now_ns()


def test_the_vanilla_of_a_server_drafts_nothing(server, decode):
    plain, other = server("vllm", answer), server("vllm", answer, speculates=True)
    decode(http(plain.url, HttpVanilla))
    with pytest.raises(
        EnvironmentFault, match="drafted 28 tokens, so it does not use plain decoding"
    ):
        decode(http(other.url, HttpVanilla))


def test_a_local_server_is_identified_by_its_process(server):
    assert http(server("vllm", answer).url).processes() == [os.getpid()]
    assert http("http://example.org:80").processes() == ()


# ---- failures
# -------------------------------------------------------------------------------------


def fails(decode, method, match: str) -> str:
    with pytest.raises(EnvironmentFault, match=match) as caught:
        decode(method)
    assert "\n" not in caught.value.message
    assert "--set engine:http." in caught.value.hint
    return caught.value.message


def test_a_missing_server_is_named_with_the_fix(server, decode):
    with_none = server("vllm", answer)
    with_none.__exit__()
    fails(decode, http(with_none.url), f"{with_none.url} cannot be reached")


def test_a_server_that_dies_between_two_prompts_fails_only_the_second(server, decode):
    double = server("vllm", answer)
    method = http(double.url)
    decode(method)
    double.__exit__()
    fails(decode, method, "cannot be reached")


@pytest.mark.parametrize("num_events", [0, 5])
def test_a_stalled_server_times_out(server, decode, num_events):
    double = server("vllm", answer)

    def stalling(events):
        yield from islice(events, num_events)
        double.closing.wait(5)

    double.streams = stalling
    fails(decode, http(double.url, timeout=0.2), r"sent no data for 0\.2 s")


def test_a_broken_connection_is_not_a_short_answer(server, decode):
    double = server("vllm", answer)

    def broken(handler):
        handler.begin()
        handler.chunk('data: {"choices": [{"text": "a", "token_ids": [7]}]}\n\n')
        handler.wfile.write(b"ff\r\nda")

    double.instead = broken
    fails(decode, http(double.url), "sent no complete reply")


STREAMS = {
    "no reason": (lambda e: islice(e, 4), "after 4 tokens without a finish reason"),
    "no JSON": (lambda e: ["<html>\x1b[2J</html>"], r"invalid reply: <html>\?\[2J</html>"),
    "no object": (lambda e: ["[1, 2]"], "an invalid reply"),
    "deep": (lambda e: ["[" * 100_000], "an invalid reply"),
    "no ids": (lambda e: [{"choices": [{"token_ids": ["a"]}]}], "an invalid reply"),
    "negative ids": (lambda e: [{"choices": [{"token_ids": [-1]}]}], "an invalid reply"),
    "two choices": (lambda e: [{"choices": [{}, {}]}], "an invalid reply"),
    "an error": (
        lambda e: [{"error": {"message": "out of memory"}}],
        "reported an error: .*out of memory",
    ),
    "empty": (
        lambda e: [{"choices": [{"text": "", "finish_reason": "length"}]}],
        "returned an empty output",
    ),
    "another model": (
        lambda e: [{"choices": [{"token_ids": [96], "finish_reason": "length"}]}],
        "returned token 96, and the target has 96",
    ),
    "too many at once": (
        lambda e: [{"choices": [{"token_ids": [7] * 21, "finish_reason": "length"}]}],
        "returned more than 20 tokens",
    ),
    "too much": (
        lambda e: ({"choices": [{"token_ids": [7]}]} for _ in range(10**6)),
        "returned more than 20 tokens",
    ),
    "a long event": (lambda e: ["x" * (2**20 + 1)], "sent no complete reply: .*byte limit"),
    "another prompt": (
        lambda e: [*islice(e, BUDGET + 1), {"usage": {"prompt_tokens": 5}}],
        "counted 5 prompt tokens; the prompt has 4",
    ),
    "another number": (
        lambda e: [*islice(e, BUDGET + 1), {"usage": {"completion_tokens": 7}}],
        "reports 7 output tokens, but its output has 20",
    ),
}


@pytest.mark.parametrize("what", STREAMS)
def test_an_invalid_answer_is_one_line_and_no_output(server, decode, what):
    double = server("vllm", answer)
    double.streams, match = STREAMS[what]
    fails(decode, http(double.url), match)


def test_an_answer_beyond_the_size_limit_is_not_read(server, decode, monkeypatch):
    monkeypatch.setattr("methods.engine_http.client.MAX_REPLY_BYTES", 1000)
    double = server("openai", answer, decode=lambda ids: "w7 " * len(ids))
    fails(decode, http(double.url), "sent a reply of more than")
    double.models = [{"id": "x" * 2000}]
    fails(decode, http(double.url), "sent a reply of more than")


@pytest.mark.parametrize("line", [": a comment", "", "event: message", "retry: 1", "data:"])
def test_bytes_outside_of_events_count_too(server, decode, monkeypatch, line):
    monkeypatch.setattr("methods.engine_http.client.MAX_REPLY_BYTES", 1000)
    double = server("vllm", answer)

    def endless(handler):
        handler.begin()
        with suppress(OSError):  # the client has closed the connection
            for _ in range(5000):
                handler.chunk(line + "\n")

    double.instead = endless
    fails(decode, http(double.url), "sent a reply of more than")


def test_a_compressed_answer_is_refused_before_decompression(server, decode):
    double = server("vllm", answer)
    double.instead = lambda handler: handler.reply(200, "x", **{"Content-Encoding": "gzip"})
    fails(decode, http(double.url), "sent its reply with the encoding gzip")
    assert double.headers["Accept-Encoding"] == "identity"


@pytest.mark.parametrize("count", ["1e400", "inf", "nan", "-1", "1e300", "9" * 400, "many", ""])
def test_an_invalid_counter_is_one_line(server, decode, monkeypatch, count):
    double = server("vllm", answer, speculates=True)
    page = double.get("/metrics").replace(" 0.0", f" {count}")
    monkeypatch.setattr(
        double, "get", lambda path, get=double.get: page if path == "/metrics" else get(path)
    )
    fails(decode, http(double.url), "has an invalid counter")


@pytest.mark.parametrize(
    ("reply", "match"),
    [
        ((500, "boom"), "rejected v1/completions: 500 boom"),
        ((404, "no such page"), "rejected v1/completions: 404 no such page"),
        ((200, "{}"), "sent no complete reply: .*content type"),
    ],
)
def test_a_refusal_is_quoted(server, decode, reply, match):
    double = server("vllm", answer)
    double.instead = lambda handler: handler.reply(*reply)
    fails(decode, http(double.url), match)


def test_no_redirect_is_followed(server, decode):
    other, double = server("vllm", answer), server("vllm", answer)
    double.instead = lambda handler: handler.reply(307, "", Location=other.url)
    fails(decode, http(double.url), f"redirects to {other.url}; redirects are not followed")
    assert other.requests == []


def test_a_proxy_of_the_environment_is_not_used(server, decode, monkeypatch):
    monkeypatch.setenv("HTTP_PROXY", "http://127.0.0.1:9")
    monkeypatch.setenv("ALL_PROXY", "http://127.0.0.1:9")
    decode(http(server("vllm", answer).url))


def test_the_requested_model_is_chosen_from_several(server, decode):
    double = server("vllm", answer)
    double.models = [{"id": name, "owned_by": "vllm"} for name in ("a", "b")]
    fails(decode, http(double.url), "has several models: a, b")
    decode(http(double.url, model="b"))
    assert double.requests[0]["model"] == "b"


def test_a_server_without_a_model_list_is_asked_for_texts(server, decode, words):
    double = server("openai", answer, decode=words)
    double.models = None
    assert list(decode(http(double.url)).output()) == answer(PROMPT, BUDGET)
    assert "model" not in double.requests[0]


def test_a_text_that_encodes_to_another_number_of_tokens_is_refused(server, decode):
    double = server("openai", answer, decode=lambda ids: "w7 w8 " * len(ids))
    fails(decode, http(double.url), "reports 20 output tokens, but its output has 40")


# ---- keys and addresses -------------------------------------------------------------------------


def test_a_key_comes_from_a_variable_and_is_in_no_message(server, decode, monkeypatch):
    monkeypatch.setenv("THEIR_KEY", "sk-very-secret")
    double = server("vllm", answer)
    method = http(double.url, key="THEIR_KEY")
    decode(method)
    assert double.headers["Authorization"] == "Bearer sk-very-secret"
    double.instead = lambda handler: handler.reply(401, "no such key: sk-very-secret")
    assert "secret" not in fails(decode, method, r"401 no such key: \*\*\*")
    assert "secret" not in str(method.params)


@pytest.mark.parametrize(
    ("params", "match"),
    [
        ({}, "engine:http needs the address of a server"),
        (
            {"url": "http://127.0.0.1:8000", "key": "NO_SUCH_KEY"},
            "environment variable .* is not set",
        ),
        ({"url": "http://example.org", "key": "PATH"}, "without encryption"),
    ],
)
def test_a_missing_parameter_is_reported_before_anything_is_loaded(params, match):
    with pytest.raises(UsageError, match=match) as caught:
        registry.build("engine:http", params).check()
    assert "--set engine:http." in caught.value.hint


@pytest.mark.parametrize(
    "url",
    ["127.0.0.1:8000", "ftp://here", "http://", "http://me:secret@here", "http://h/?key=1", "x"],
)
def test_an_invalid_address_is_refused(url):
    with pytest.raises(UsageError, match=r"engine:http\.url"):
        registry.build("engine:http", {"url": url})


def test_the_v1_of_an_address_is_optional():
    assert HttpParams(url="http://h:8000/v1/").url == "http://h:8000"

"""Servers as engines: any that has OpenAI's completions, with ids and counters where it tells them.

vLLM (Kwon et al., arXiv:2309.06180), SGLang (Zheng et al., arXiv:2312.07104), llama.cpp's server,
and whatever else streams /v1/completions: `methods._engines.servers` says what each is asked. The
prompt's very ids go there; a server that takes texts alone gets the text that reads as these, and
the ids of what it answers are those of that text, tokenised here.

All of a request is timed: TTFT until the first piece of the output is here, the total until the
last. What it takes to the server and back is in both. A server counts drafted and accepted tokens,
and tells no steps.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from functools import cached_property
from typing import Annotated, Any, ClassVar, Literal

from pydantic import AfterValidator

from methods._engines.client import Client, checked
from methods._engines.servers import Asked, Reply, Server
from specbench_cli.api import (
    Field,
    Method,
    MethodFault,
    MethodParams,
    PeerSession,
    Session,
    Step,
    UsageError,
    key_of,
)


class HttpParams(MethodParams):
    """Parameters of `Http` and `HttpVanilla`."""

    url: Annotated[str, AfterValidator(checked)] | None = Field(
        None, description="where the server is, such as http://127.0.0.1:8000"
    )
    server: Literal["auto", "openai", "vllm", "llama.cpp", "sglang"] = Field(
        "auto", description="its kind; auto: what its list of models says"
    )
    model: str | None = Field(None, description="one of its models; default: the only one")
    key: str | None = Field(None, description="environment variable that holds an API key")
    timeout: float = Field(60.0, gt=0, description="seconds of silence that end a request")


class HttpVanilla(Method):
    """A server that decodes plainly: the baseline of engine:http."""

    name: ClassVar[str] = "engine:http-vanilla"
    Params: ClassVar[type[MethodParams]] = HttpParams
    peer: ClassVar[bool] = True
    baseline: ClassVar[str] = "engine:http-vanilla"
    params: HttpParams

    def check(self) -> None:
        """See that there are an address and a key."""
        self._client  # noqa: B018

    def processes(self) -> Sequence[int]:
        """The server's, where it is on this machine."""
        return self._client.processes()

    def generate(self, session: Session) -> Iterator[Step]:
        """All tokens in one request; no step is told."""
        assert isinstance(session, PeerSession)
        if session.sampling.rule == "coupled":
            raise MethodFault(
                f"{self.name} draws by chances of the server's own, which are not vanilla's",
                "--temperature 0, or --verify rejection",
            )
        asked = _asked(session, self._server)
        reply = self._server.complete(asked, session.now)
        ids = _ids(session, reply, self._client)
        session.adopt_tokens(ids, reply.first_ns, reply.last_ns)
        self._server.count(reply)
        if reply.drafted is not None and reply.accepted is not None:
            self.drafts(reply.drafted)
            session.count(drafted=reply.drafted, accepted=reply.accepted)
        if reply.text and not reply.ids:
            session.count(text=1)
        yield from ()

    def drafts(self, drafted: int) -> None:
        """Take note of how many tokens the server drafted. Raises EnvironmentFault: it is no
        plain one."""
        if drafted:
            raise self._client.fault(
                f"drafted {drafted} tokens: it does not decode plainly",
                f"start one without speculation for {self.name}, and add engine:http for this one",
            )

    @cached_property
    def _client(self) -> Client:
        params, url = self.params, self.params.url
        if url is None:
            raise UsageError(
                f"{self.name} asks a server, and none is named",
                f"--set {self.name}.url=http://127.0.0.1:8000",
            )
        return Client(url, self.name, params.key, params.timeout)

    @cached_property
    def _server(self) -> Server:
        return Server(self._client, self.params.server, self.params.model)


class Http(HttpVanilla):
    """A server that decodes as it likes: vLLM, SGLang, llama.cpp, others with OpenAI's API."""

    name: ClassVar[str] = "engine:http"

    def drafts(self, drafted: int) -> None:
        """It may."""


def _asked(session: PeerSession, server: Server) -> Asked:
    """The session's request in the words of servers."""
    request, sampling = session.requests[0], session.sampling
    if request.source is not None:
        raise MethodFault(f"{request.prompt_id} holds more than a text, and servers are sent texts")
    draw = key_of("http", sampling.seed, request.prompt_id, request.turn, session.pass_)
    return Asked(
        ids=request.ids,
        text="" if server.kind.tells_ids else _text(session.tokenizer, list(request.ids)),
        budget=request.stop.max_new_tokens,
        stops=sorted(request.stop.eos),
        temperature=sampling.temperature if sampling.draws else 0.0,
        top_p=sampling.top_p,
        top_k=sampling.top_k,
        seed=draw % 2**31,
        model=server.model,
    )


def _text(tokenizer: Any, ids: list[int]) -> str:
    """The text that a tokenizer reads as these ids, with or without a BOS that it adds itself."""
    for skipped in (0, 1):
        text: str = tokenizer.decode(ids[skipped:], clean_up_tokenization_spaces=False)
        if tokenizer(text).input_ids == ids:
            return text
    raise MethodFault(
        "no text reads as this prompt's ids, and the server takes texts alone", "leave the row out"
    )


def _ids(session: PeerSession, reply: Reply, client: Client) -> list[int]:
    """The output's ids, an EOS that the server does not tell included.

    Raises:
        EnvironmentFault: it is no output of this prompt and this target.
    """
    request, tokenizer = session.requests[0], session.tokenizer
    most, eos, read = request.stop.max_new_tokens, request.stop.eos, reply.prompt_tokens
    if reply.finish is None:
        raise client.fault(f"ended its answer after {len(reply.ids)} tokens without saying why")
    if read not in (None, len(request.ids)):
        raise client.fault(f"read {read} tokens where the prompt has {len(request.ids)}")
    ids = list(reply.ids)
    if reply.text and not ids:
        ids = tokenizer(reply.text, add_special_tokens=False).input_ids
    told = len(ids)
    if reply.finish == "stop" and eos and eos.isdisjoint(ids[-1:]) and told < most:
        ids.append(tokenizer.eos_token_id if tokenizer.eos_token_id in eos else min(eos))
    if reply.tokens not in (None, told, len(ids)):
        raise client.fault(f"made {reply.tokens} tokens, and what it sent reads as {told}")
    if not ids:
        raise client.fault("answered with nothing")
    if max(ids) >= session.target.vocab_size:
        limit = session.target.vocab_size
        raise client.fault(f"made token {max(ids)}, and the target has {limit}: another model's")
    if told > most:
        raise client.fault(f"made {told} tokens where {most} were asked for")
    return ids

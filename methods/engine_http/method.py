"""Methods that decode with an inference server: `engine:http` and `engine:http-vanilla`.

Supported are vLLM (Kwon et al., arXiv:2309.06180), SGLang (Zheng et al., arXiv:2312.07104),
llama.cpp's server, and other servers with OpenAI's endpoint /v1/completions.
`methods/engine_http/servers.py` defines the request format of each kind of server. A request
contains the token ids of the prompt. If a server accepts only text, the prompt is sent as text, and
the text of the output is tokenised.

The time to first token (TTFT) ends when the first chunk of the output arrives. The total time ends
with the last chunk. Both times include the network. A server may report the number of drafted and
accepted tokens. No server reports single decoding steps.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from functools import cached_property
from typing import Annotated, ClassVar, Literal

from pydantic import AfterValidator

from methods._engines import build_request, read_output, report_output
from methods.engine_http.client import HttpClient, normalize_url, read_secret
from methods.engine_http.servers import InferenceServer
from specbench_cli.api import (
    Field,
    Method,
    MethodParams,
    PeerSession,
    Session,
    Step,
    UsageError,
)


class HttpParams(MethodParams):
    """Parameters of `Http` and `HttpVanilla`."""

    url: Annotated[str, AfterValidator(normalize_url)] | None = Field(
        None, description="address of the server, such as http://127.0.0.1:8000"
    )
    server: Literal["auto", "openai", "vllm", "llama.cpp", "sglang"] = Field(
        "auto", description="kind of server; auto detects it from the server's list of models"
    )
    model: str | None = Field(None, description="model of the server; by default its only model")
    key: str | None = Field(
        None, description="name of the environment variable that contains the API key"
    )
    timeout: float = Field(
        60.0, gt=0, description="maximum time without data from the server, in seconds"
    )


class HttpVanilla(Method):
    """Plain decoding with a server: the baseline of `engine:http`."""

    name: ClassVar[str] = "engine:http-vanilla"
    family: ClassVar[str] = "a server"
    project: ClassVar[str] = "any server with OpenAI's completions"
    Params: ClassVar[type[MethodParams]] = HttpParams
    peer: ClassVar[bool] = True
    baseline: ClassVar[str] = "engine:http-vanilla"
    params: HttpParams

    def check(self) -> None:
        """Raise UsageError if the server's URL or the API key is missing."""
        self._client  # noqa: B018

    def processes(self) -> Sequence[int]:
        """Return the process ids of the server if it runs on this machine."""
        return self._client.find_processes()

    def generate(self, session: Session) -> Iterator[Step]:
        """Decode the request with one HTTP request. Yield no steps, because servers report none."""
        assert isinstance(session, PeerSession)
        kind, model = self._server.kind, self._server.model
        request = build_request(session, self.name, model=model, text=not kind.uses_token_ids)
        reply = self._server.complete(request, session.now_ns)
        ids = read_output(session, reply, self._client.make_fault)
        self._server.add_draft_counts(reply)
        report_output(session, reply, ids)
        self.check_drafted(reply.drafted or 0)
        if reply.text and not reply.ids:
            session.count(text=1)
        yield from ()

    def check_drafted(self, drafted: int) -> None:
        """Raise EnvironmentFault if the server drafted tokens, because a baseline must not."""
        if drafted:
            raise self._client.make_fault(
                f"drafted {drafted} tokens, so it does not use plain decoding",
                f"for {self.name}, use a server without speculative decoding; for this server, use"
                " engine:http",
            )

    @cached_property
    def _client(self) -> HttpClient:
        params, url = self.params, self.params.url
        if url is None:
            raise UsageError(
                f"{self.name} needs the address of a server",
                f"--set {self.name}.url=http://127.0.0.1:8000",
            )
        secret = read_secret(url, self.name, params.key)
        return HttpClient(url, self.name, secret, params.timeout)

    @cached_property
    def _server(self) -> InferenceServer:
        return InferenceServer(self._client, self.params.server, self.params.model)


class Http(HttpVanilla):
    """Decoding with a server that may speculate: vLLM, SGLang, llama.cpp or OpenAI's API."""

    name: ClassVar[str] = "engine:http"

    def check_drafted(self, drafted: int) -> None:
        """Accept any number of draft tokens. Only the baseline must not draft."""

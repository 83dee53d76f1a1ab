"""Kinds of inference servers.

Each kind has its own request format, streamed events and draft counters.

The formats are those of vLLM 0.33, SGLang 0.5.23, llama.cpp's server, and OpenAI's completions API.
All of these servers support OpenAI's API.
"""

from __future__ import annotations

import math
import secrets
from abc import ABC, abstractmethod
from collections.abc import Callable
from typing import Annotated, Any, ClassVar

from pydantic import BaseModel, Field

from methods._engines import CompletionReply, CompletionRequest
from methods.engine_http.client import HttpClient

MAX_COUNT = 2**63
"""Exclusive upper bound of valid token counts in replies."""
Count = Annotated[int, Field(ge=0, lt=MAX_COUNT)]


class ReplyEvent(BaseModel, ABC):
    """Event of a streamed reply."""

    error: Any = None

    @abstractmethod
    def add(self, reply: CompletionReply) -> None:
        """Add the content of the event to the reply."""


class CompletionChoice(BaseModel):
    """Chunk of the output in an event of /v1/completions. `token_ids` is an extension of vLLM."""

    text: str | None = None
    token_ids: list[Count] | None = None
    finish_reason: str | None = None


class TokenUsage(BaseModel):
    """Token usage of a request: number of prompt tokens and of output tokens."""

    prompt_tokens: Count | None = None
    completion_tokens: Count | None = None


class Completion(ReplyEvent):
    """Event of /v1/completions."""

    choices: Annotated[list[CompletionChoice], Field(max_length=1)] = []
    usage: TokenUsage | None = None

    def add(self, reply: CompletionReply) -> None:
        for choice in self.choices:
            reply.text += choice.text or ""
            reply.ids += choice.token_ids or []
            reply.finish = choice.finish_reason or reply.finish
        if self.usage is not None:
            reply.prompt_tokens = self.usage.prompt_tokens
            reply.tokens = self.usage.completion_tokens


class Timings(BaseModel):
    """Draft counts in a reply of llama.cpp. `draft_n` is None if the server does not draft."""

    draft_n: Count | None = None
    draft_n_accepted: Count = 0


class LlamaCppEvent(ReplyEvent):
    """Event of llama.cpp's /completion."""

    content: str = ""
    tokens: list[Count] = []
    stop: bool = False
    stop_type: str = ""
    tokens_evaluated: Count | None = None
    timings: Timings | None = None

    def add(self, reply: CompletionReply) -> None:
        reply.text += self.content
        reply.ids += self.tokens
        if self.stop:
            reply.finish = {"limit": "length", "eos": "stop"}.get(self.stop_type, self.stop_type)
            reply.prompt_tokens = self.tokens_evaluated
            if self.timings is not None and self.timings.draft_n is not None:
                reply.drafted = self.timings.draft_n
                reply.accepted = self.timings.draft_n_accepted


class FinishReason(BaseModel):
    """Finish reason in an event of SGLang."""

    type: str


class MetaInfo(BaseModel):
    """Counts and finish reason in an event of SGLang.

    The `spec_*` counts are None if the server does not draft.
    """

    prompt_tokens: Count | None = None
    completion_tokens: Count
    finish_reason: FinishReason | None = None
    spec_accept_token_num: Count | None = None
    spec_draft_token_num: Count | None = None


class SglangEvent(ReplyEvent):
    """Event of SGLang's /generate."""

    output_ids: list[Count] = []
    meta_info: MetaInfo | None = None

    def add(self, reply: CompletionReply) -> None:
        if self.meta_info is None:
            return
        meta = self.meta_info
        whole = len(self.output_ids) == meta.completion_tokens  # all ids so far, or only new ones
        reply.ids = self.output_ids if whole else reply.ids + self.output_ids
        reply.prompt_tokens, reply.tokens = meta.prompt_tokens, meta.completion_tokens
        reply.drafted, reply.accepted = meta.spec_draft_token_num, meta.spec_accept_token_num
        reply.finish = reply.finish if meta.finish_reason is None else meta.finish_reason.type


class ServerKind(ABC):
    """Kind of inference server, such as vLLM.

    Class attributes: owner: Value of `owned_by` in the server's list of models, which identifies
    the kind. path: Path of the endpoint for completions. event: Class of the streamed events.
    uses_token_ids: Whether the server accepts and returns token ids. Otherwise it accepts and
    returns text.
    """

    owner: ClassVar[str] = ""
    path: ClassVar[str] = "v1/completions"
    event: ClassVar[type[ReplyEvent]] = Completion
    uses_token_ids: ClassVar[bool] = True

    @abstractmethod
    def body(self, request: CompletionRequest) -> dict[str, Any]:
        """Return the body of a completion request.

        The body sets every sampling option, because servers have different defaults.
        """

    def read_totals(self, client: HttpClient) -> tuple[int, int] | None:
        """Return the number of drafted tokens and of accepted tokens since the server started.

        Return None if the server has no such counters, or if each reply contains its own counts.
        """
        return None


class OpenAiServer(ServerKind):
    """Server with OpenAI's completions endpoint, which accepts and returns text."""

    uses_token_ids = False

    def body(self, request: CompletionRequest) -> dict[str, Any]:
        return {
            **({} if request.model is None else {"model": request.model}),
            "prompt": request.text,
            "max_tokens": request.budget,
            "temperature": request.temperature,
            "top_p": request.top_p,
            "seed": request.seed,
            "stream": True,
            "stream_options": {"include_usage": True},
        }


class VllmServer(OpenAiServer):
    """vLLM server. It reports draft counts only in /metrics.

    `cache_salt` disables its prefix cache.
    """

    owner = "vllm"
    uses_token_ids = True
    counters: ClassVar[tuple[str, str]] = (
        "vllm:spec_decode_num_draft_tokens_total",
        "vllm:spec_decode_num_accepted_tokens_total",
    )

    def body(self, request: CompletionRequest) -> dict[str, Any]:
        return super().body(request) | {
            "prompt": list(request.ids),
            "return_token_ids": True,
            "stop_token_ids": list(request.stops),
            "top_k": request.top_k,
            "min_p": 0.0,
            "repetition_penalty": 1.0,
            "presence_penalty": 0.0,
            "frequency_penalty": 0.0,
            "cache_salt": secrets.token_hex(),
        }

    def read_totals(self, client: HttpClient) -> tuple[int, int] | None:
        page = client.read("metrics") or ""
        sums = dict[str, float]()
        for line in page.splitlines():
            name, _, rest = line.replace("{", " ", 1).partition(" ")
            if name in self.counters:
                count = _number(rest.rpartition("}")[2])
                if not 0 <= count < MAX_COUNT:
                    raise client.make_fault(f"has an invalid counter in /metrics: {line}")
                sums[name] = sums.get(name, 0.0) + count
        drafted, accepted = (sums.get(name) for name in self.counters)
        return None if drafted is None or accepted is None else (int(drafted), int(accepted))


def _number(text: str) -> float:
    """Return the number in a text as a float, or nan if the text is not a number."""
    try:
        return float(text)
    except ValueError:
        return math.nan


class LlamaCppServer(ServerKind):
    """llama.cpp's server. It is used through its own endpoint, because OpenAI's returns no token
    ids.
    """

    owner = "llamacpp"
    path = "completion"
    event = LlamaCppEvent

    def body(self, request: CompletionRequest) -> dict[str, Any]:
        return {
            "prompt": list(request.ids),
            "n_predict": request.budget,
            "temperature": request.temperature,
            "top_p": request.top_p,
            "top_k": request.top_k,
            "min_p": 0.0,
            "repeat_penalty": 1.0,
            "seed": request.seed,
            "stream": True,
            "return_tokens": True,
            "cache_prompt": False,
        }


class SglangServer(ServerKind):
    """SGLang server. It is used through its own endpoint, because OpenAI's returns no draft
    counts.
    """

    owner = "sglang"
    path = "generate"
    event = SglangEvent

    def body(self, request: CompletionRequest) -> dict[str, Any]:
        return {
            "input_ids": list(request.ids),
            "sampling_params": {
                "max_new_tokens": request.budget,
                "temperature": request.temperature,
                "top_p": request.top_p,
                "top_k": request.top_k or -1,
                "min_p": 0.0,
                "repetition_penalty": 1.0,
                "stop_token_ids": list(request.stops),
            },
            "stream": True,
        }


KINDS: dict[str, ServerKind] = {
    "openai": OpenAiServer(),
    "vllm": VllmServer(),
    "llama.cpp": LlamaCppServer(),
    "sglang": SglangServer(),
}


class ListedModel(BaseModel):
    """Entry of a server's list of models."""

    id: str
    owned_by: str = ""


class ModelList(BaseModel):
    """List of models of a server."""

    data: list[ListedModel]


class InferenceServer:
    """Inference server. The user names its kind, or specbench detects the kind.

    Args:
        client: HTTP client for the server.
        kind: Key of `KINDS`, or "auto" to detect the kind from the list of models.
        model: Name of the model to use. None if the server has only one model.

    Raises:
        EnvironmentFault: The server has several models and `model` is None, or a request failed.
    """

    def __init__(self, client: HttpClient, kind: str, model: str | None) -> None:
        self._client = client
        page = client.read("v1/models")
        found = [] if page is None else client.parse(page, ModelList).data
        if model is None and len(found) > 1:
            raise client.make_fault(
                f"has several models: {', '.join(each.id for each in found)}",
                client.format_option("model", "ID"),
            )
        self.model = model or next((each.id for each in found), None)
        owners = {each.owned_by for each in found}
        known = (each for each in KINDS.values() if each.owner and each.owner in owners)
        self.kind = next(known, KINDS["openai"]) if kind == "auto" else KINDS[kind]
        self._totals = self.kind.read_totals(client)

    def complete(self, request: CompletionRequest, now_ns: Callable[[], int]) -> CompletionReply:
        """Send a request and return the reply.

        Args:
            request: The request.
            now_ns: Function that returns the current time in ns.

        Raises:
            EnvironmentFault: The request failed.
        """
        reply, client = CompletionReply(), self._client
        for event in client.stream_events(self.kind.path, self.kind.body(request), self.kind.event):
            if event.error is not None:
                raise client.make_fault(f"reported an error: {event.error}")
            before = reply.progress
            event.add(reply)
            if reply.progress != before:
                reply.last_ns = now_ns()
                reply.first_ns = reply.first_ns or reply.last_ns
            if len(reply.ids) > request.budget:
                raise client.make_fault(f"returned more than {request.budget} tokens, the maximum")
        return reply

    def add_draft_counts(self, reply: CompletionReply) -> None:
        """Add draft counts to a reply, for servers that report only totals since the server
        started.

        The counts are the differences of the totals before and after the request. Reading the
        totals takes one HTTP request.
        """
        before, self._totals = self._totals, self.kind.read_totals(self._client)
        if before is not None and self._totals is not None:
            drafted, accepted = (
                after - earlier for after, earlier in zip(self._totals, before, strict=True)
            )
            reply.drafted, reply.accepted = max(0, drafted), max(0, accepted)

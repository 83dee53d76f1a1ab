"""Test server with the protocols of real inference servers, which can also misbehave in every
way."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator, Sequence
from functools import partial
from http.server import BaseHTTPRequestHandler
from socketserver import TCPServer
from threading import Event, Thread
from typing import Any

OWNERS = {"openai": "somebody", "vllm": "vllm", "llama.cpp": "llamacpp", "sglang": "sglang"}
STEP, DRAFTED = 3, 4
"""Tokens committed per step, of which all but one were drafted, and tokens drafted per step."""


class Double:
    """A server of one kind; a context manager.

    Args:
        kind: one of `OWNERS`.
        answer: from a prompt's ids, or its text, and a budget to the output's ids.
        eos: the id that ends an output. decode: from ids to text, where texts are told.

    Attributes:
        url: where it is.
        speculates: whether it drafts.
        requests: the bodies that it got; headers: those of the newest.
        instead: what it does in place of answering a POST.
        models: what it says that it has.
        streams: changes what it streams.
    """

    def __init__(
        self,
        kind: str,
        answer: Callable[[Any, int], list[int]],
        *,
        eos: int = 1,
        decode: Callable[[Sequence[int]], str] = str,
        speculates: bool = False,
    ) -> None:
        self.kind, self.answer, self.eos, self.decode = kind, answer, eos, decode
        self.speculates = speculates
        self.models: list[dict[str, Any]] | None = [{"id": "tiny", "owned_by": OWNERS[kind]}]
        self.requests: list[dict[str, Any]] = []
        self.headers: dict[str, str] = {}
        self.instead: Callable[[_Handler], None] | None = None
        self.streams: Callable[[Iterator[Any]], Iterator[Any]] = iter
        self.closing = Event()
        self.read_totals = [0, 0]
        self._server = TCPServer(("127.0.0.1", 0), partial(_Handler, self))
        self._server.handle_error = lambda *_: None  # type: ignore[method-assign]  # clients leave
        self.url = f"http://127.0.0.1:{self._server.server_address[1]}"
        self._thread = Thread(target=self._server.serve_forever, args=(0.01,), daemon=True)

    def __enter__(self) -> Double:
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self.closing.set()
        self._server.shutdown()
        self._server.server_close()
        self._thread.join()

    def get(self, path: str) -> str | None:
        """The page at a path."""
        if path == "/v1/models" and self.models is not None:
            return json.dumps({"object": "list", "data": self.models})
        if path == "/metrics" and self.kind == "vllm":
            names = ("draft_tokens", "accepted_tokens") if self.speculates else ()
            lines = (
                f'vllm:spec_decode_num_{name}_total{{engine="0"}} {float(total)}'
                for name, total in zip(names, self.read_totals, strict=False)
            )
            return "\n".join(["# HELP vllm:spec_decode_num_draft_tokens_total ...", *lines])
        return None

    def events(self, body: dict[str, Any]) -> Iterator[Any]:
        """Yield the streamed events of a reply."""
        prompt = body["input_ids"] if self.kind == "sglang" else body["prompt"]
        options = body.get("sampling_params", body)
        budget = (
            options.get("max_tokens") or options.get("n_predict") or options.get("max_new_tokens")
        )
        ids = self.answer(prompt, budget)
        ended = ids[-1] == self.eos
        sent = ids[:-1] if ended and self.kind in ("openai", "llama.cpp") else ids
        step = STEP if self.speculates else 1
        pieces = [sent[:1], *(sent[at : at + step] for at in range(1, len(sent), step))]
        steps = len(pieces) - 1
        drafted = DRAFTED * steps if self.speculates else 0
        accepted = len(sent) - 1 - steps if self.speculates else 0
        self.read_totals = [self.read_totals[0] + drafted, self.read_totals[1] + accepted]
        if self.kind == "llama.cpp":
            yield from ({"content": self.decode(p), "tokens": p, "stop": False} for p in pieces)
            timings = {"draft_n": drafted, "draft_n_accepted": accepted} if self.speculates else {}
            yield {
                "content": "",
                "tokens": [],
                "stop": True,
                "stop_type": "eos" if ended else "limit",
                "tokens_evaluated": len(prompt),
                "timings": {"predicted_n": len(ids), **timings},
            }
            return
        if self.kind == "sglang":
            counted = {"spec_draft_token_num": drafted, "spec_accept_token_num": accepted}
            for at, _ in enumerate(pieces, start=1):
                so_far = [token for piece in pieces[:at] for token in piece]
                last = {"type": "stop" if ended else "length"} if at == len(pieces) else None
                meta = {"prompt_tokens": len(prompt), "completion_tokens": len(so_far)}
                more = counted if self.speculates else {}
                yield {"output_ids": so_far, "meta_info": {**meta, "finish_reason": last, **more}}
            yield "[DONE]"
            return
        for place, piece in enumerate(pieces):
            text = self.decode(piece) if self.kind == "vllm" or not place else ""
            if self.kind == "openai":  # with the space that belongs to it
                text = self.decode(sent[: sum(map(len, pieces[: place + 1]))]).removeprefix(
                    self.decode(sent[: sum(map(len, pieces[:place]))])
                )
            choice = {"index": 0, "text": text, "logprobs": None, "finish_reason": None}
            id_fields = {"token_ids": piece} if body.get("return_token_ids") else {}
            yield {"object": "text_completion", "choices": [{**choice, **id_fields}]}
        reason = "stop" if ended else "length"
        yield {"choices": [{"index": 0, "text": "", "finish_reason": reason}]}
        n = len(prompt.split()) if isinstance(prompt, str) else len(prompt)
        yield {"choices": [], "usage": {"prompt_tokens": n, "completion_tokens": len(ids)}}
        yield "[DONE]"


class _Handler(BaseHTTPRequestHandler):
    """Handler of one request. The connection ends with it, so one thread serves all."""

    protocol_version = "HTTP/1.1"

    def __init__(self, double: Double, *args: Any) -> None:
        self.double = double
        super().__init__(*args)

    def log_message(self, *_: object) -> None:
        """Print nothing."""

    def do_GET(self) -> None:
        self.double.headers = dict(self.headers)
        page = self.double.get(self.path)
        self.reply(404 if page is None else 200, page or "")

    def do_POST(self) -> None:
        double = self.double
        body = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
        double.headers = dict(self.headers)
        double.requests.append({"path": self.path, **body})
        if double.instead is not None:
            double.instead(self)
            return
        self.begin()
        for event in double.streams(double.events(body)):
            if double.closing.is_set():
                return
            text = event if isinstance(event, str) else json.dumps(event)
            self.chunk(f"data: {text}\n\n")
        self.chunk("")

    def begin(self, kind: str = "text/event-stream") -> None:
        """Send the head of a streamed reply."""
        self.send_response(200)
        for name, value in {"Content-Type": kind, "Transfer-Encoding": "chunked"}.items():
            self.send_header(name, value)
        self.send_header("Connection", "close")
        self.end_headers()

    def chunk(self, text: str) -> None:
        """Send a chunk. An empty one ends the reply."""
        data = text.encode()
        self.wfile.write(f"{len(data):x}\r\n".encode() + data + b"\r\n")
        self.wfile.flush()

    def reply(self, status: int, text: str, **headers: str) -> None:
        """Send a complete reply."""
        data = text.encode()
        self.send_response(status)
        for name, value in {"Content-Length": str(len(data)), **headers}.items():
            self.send_header(name.replace("_", "-"), value)
        self.send_header("Connection", "close")
        self.end_headers()
        self.wfile.write(data)

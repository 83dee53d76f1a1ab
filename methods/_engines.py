"""Helpers for methods that decode with the engine of another project.

Examples are inference servers such as vLLM, llama.cpp and OpenVINO GenAI. The helpers convert
requests and replies. They also write model files for engines that cannot read a transformers model.
"""

from __future__ import annotations

import shutil
import tempfile
from collections.abc import Callable, Hashable, Sequence
from dataclasses import dataclass, field
from importlib.util import find_spec
from pathlib import Path
from typing import Any
from weakref import WeakKeyDictionary, finalize

from specbench_cli.api import EnvironmentFault, MethodFault, PeerSession, hash_key


@dataclass(frozen=True, slots=True)
class CompletionRequest:
    """Completion request in a form that is independent of the server.

    Attributes:
        ids: Token ids of the prompt.
        text: Text of the prompt, for servers that accept only text. Otherwise empty.
        budget: Maximum number of new tokens.
        stops: Token ids that end the output.
        seed: Random seed of this request.
        model: Name of the server's model. None if the server has only one model.
    """

    ids: Sequence[int]
    text: str
    budget: int
    stops: Sequence[int]
    temperature: float
    top_p: float
    top_k: int
    seed: int
    model: str | None


@dataclass(slots=True)
class CompletionReply:
    """Reply of an engine to a completion request.

    Attributes:
        ids: Token ids of the output, if the engine returns them.
        text: Text of the output, if the engine returns text.
        first_ns, last_ns: Times at which the first and the last chunk of the output arrived, in ns.
        finish: Finish reason, such as "stop" or "length". None if the engine has not sent one.
        prompt_tokens, tokens: Number of prompt tokens and number of output tokens, as the engine
            reports them.
        drafted, accepted: Number of drafted tokens and number of accepted tokens, as the engine
            reports them.
    """

    ids: list[int] = field(default_factory=list)
    text: str = ""
    first_ns: int = 0
    last_ns: int = 0
    finish: str | None = None
    prompt_tokens: int | None = None
    tokens: int | None = None
    drafted: int | None = None
    accepted: int | None = None

    @property
    def progress(self) -> tuple[int, int, str | None]:
        """Output length in tokens, output length in characters, and finish reason.

        If this value is equal before and after a chunk, the chunk added nothing to the output.
        """
        return len(self.ids), len(self.text), self.finish


def build_request(
    session: PeerSession, name: str, *, model: str | None = None, text: bool = False
) -> CompletionRequest:
    """Return the session's request as `CompletionRequest`.

    Args:
        session: Session with one request.
        name: Name of the method, for error messages.
        model: Name of the server's model. None if the server has only one model.
        text: Whether to send the prompt as text instead of token ids.

    Raises:
        MethodFault: The server cannot decode this prompt, or does not support this sampling rule.
    """
    request, sampling = session.requests[0], session.sampling
    if sampling.rule == "coupled":
        raise MethodFault(
            f"{name} uses the engine's random numbers, so coupled sampling is not possible",
            "use --temperature 0 or --verify rejection",
        )
    check_text(session, name)
    draw = hash_key("http", sampling.seed, request.prompt_id, request.turn, session.pass_)
    return CompletionRequest(
        ids=request.ids,
        text=_decode_prompt(session.tokenizer, list(request.ids)) if text else "",
        budget=request.stop.max_new_tokens,
        stops=sorted(request.stop.eos),
        temperature=sampling.temperature if sampling.draws else 0.0,
        top_p=sampling.top_p,
        top_k=sampling.top_k,
        seed=draw % 2**31,
        model=model,
    )


def check_text(session: PeerSession, name: str) -> None:
    """Raise MethodFault if a request contains more than text, for example an image."""
    request = session.requests[0]
    if request.source is not None:
        raise MethodFault(
            f"{request.prompt_id} contains more than text, such as an image; {name} supports only"
            " text"
        )


def _decode_prompt(tokenizer: Any, ids: list[int]) -> str:
    """Return a text that the tokenizer encodes as these ids.

    If the tokenizer adds a BOS token itself, the text does not contain it.

    Raises:
        MethodFault: No such text was found.
    """
    for skipped in (0, 1):
        text: str = tokenizer.decode(ids[skipped:], clean_up_tokenization_spaces=False)
        if tokenizer(text).input_ids == ids:
            return text
    raise MethodFault(
        "the prompt's token ids cannot be written as text, and the server accepts only text",
        "run without this method",
    )


def read_output(
    session: PeerSession, reply: CompletionReply, fault: Callable[[str], Exception]
) -> list[int]:
    """Return the token ids of a reply. Append the EOS token if the engine omitted it.

    Args:
        session: Session with one request.
        reply: Reply of the engine.
        fault: Function that creates the exception from a description of the problem.

    Raises:
        Exception: The reply is not a valid output for this prompt and this target. `fault` creates
            the exception.
    """
    request, tokenizer = session.requests[0], session.tokenizer
    most, eos, read = request.stop.max_new_tokens, request.stop.eos, reply.prompt_tokens
    if reply.finish is None:
        raise fault(f"ended its reply after {len(reply.ids)} tokens without a finish reason")
    if read not in (None, len(request.ids)):
        raise fault(f"counted {read} prompt tokens; the prompt has {len(request.ids)}")
    ids = list(reply.ids)
    if reply.text and not ids:
        ids = tokenizer(reply.text, add_special_tokens=False).input_ids
    received = len(ids)
    if reply.finish == "stop" and eos and eos.isdisjoint(ids[-1:]) and received < most:
        ids.append(tokenizer.eos_token_id if tokenizer.eos_token_id in eos else min(eos))
    if reply.tokens not in (None, received, len(ids)):
        raise fault(f"reports {reply.tokens} output tokens, but its output has {received}")
    if not ids:
        raise fault("returned an empty output")
    if max(ids) >= session.target.vocab_size:
        limit = session.target.vocab_size
        raise fault(
            f"returned token {max(ids)}, and the target has {limit} tokens; it runs another model"
        )
    if received > most:
        raise fault(f"returned {received} tokens; the maximum is {most}")
    return ids


def report_output(session: PeerSession, reply: CompletionReply, ids: Sequence[int]) -> None:
    """Commit the engine's output tokens to the session.

    Record the engine's draft counts if it has any.
    """
    session.adopt_tokens(ids, reply.first_ns, reply.last_ns)
    if reply.drafted is not None and reply.accepted is not None:
        session.count(drafted=reply.drafted, accepted=reply.accepted)


def check_installed(name: str, package: str, engine: str, extra: str) -> None:
    """Raise EnvironmentFault, with the install command, if a package is not installed.

    Args:
        name: Name of the method that needs the package.
        package: Import name of the package.
        engine: Name of the engine in messages.
        extra: Extra of the specbench package (as in `pip install specbench[extra]`) that installs
            the package.
    """
    if find_spec(package) is None:
        raise EnvironmentFault(
            f"{name} needs {engine}, which is not installed",
            f"pip install 'specbench-cli[{extra}]'",
        )


_folders: WeakKeyDictionary[Any, dict[Hashable, Path]] = WeakKeyDictionary()
"""Folders with model files for an engine, by transformers module and kind of files.

They are written at first use. They are removed when the module is freed, or at the end of the
program.
"""


def get_model_folder(module: Any, kind: Hashable, write: Callable[[Path], None]) -> Path:
    """Return a folder with the model files of a transformers module.

    The first call writes the files.

    Args:
        module: The transformers module.
        kind: File format, such as "gguf". A module may have files in several formats.
        write: Function that writes the files to an empty folder.
    """
    folders = _folders.setdefault(module, {})
    if kind not in folders:
        folder = Path(tempfile.mkdtemp(prefix="specbench-engine-"))
        finalize(module, shutil.rmtree, folder, ignore_errors=True)
        write(folder)
        folders[kind] = folder
    return folders[kind]

"""Exchange with the engines of other projects: requests, replies and model files."""

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
    """A completion request, independent of the server's API.

    Attributes:
        ids: Token ids of the prompt.
        text: Text that the tokenizer encodes as `ids`. Empty if the engine accepts ids.
        budget: Maximum number of new tokens.
        stops: Token ids that end the output.
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
    """The reply of an engine.

    Attributes:
        ids: Token ids of the output, if the engine returns them; otherwise `text` is set.
        first_ns, last_ns: Times when the first and the last piece of the output arrived.
        finish: Finish reason.
        prompt_tokens, tokens: Number of prompt and output tokens, as the engine reports them.
        drafted, accepted: Number of drafted and accepted tokens, if the engine counts them.
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
        """Values that change with every piece of the output, including an EOS that the engine does
        not return."""
        return len(self.ids), len(self.text), self.finish


def build_request(
    session: PeerSession, name: str, *, model: str | None = None, text: bool = False
) -> CompletionRequest:
    """Return the session's request in the form that servers accept.

    Args:
        name: Name of the method that sends the request.
        model: Model of the server. None uses the server's only model.
        text: Send the prompt as text, for servers that accept only text.
    Raises:
        MethodFault: The engine cannot decode this request, or cannot use this sampling rule.
    """
    request, sampling = session.requests[0], session.sampling
    if sampling.rule == "coupled":
        raise MethodFault(
            f"{name} draws by chances of the engine's own, which are not vanilla's",
            "--temperature 0, or --verify rejection",
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
            f"{request.prompt_id} holds more than a text, which is all that {name} is given"
        )


def _decode_prompt(tokenizer: Any, ids: list[int]) -> str:
    """Return a text that the tokenizer encodes as these ids, with or without a BOS token that it
    adds itself."""
    for skipped in (0, 1):
        text: str = tokenizer.decode(ids[skipped:], clean_up_tokenization_spaces=False)
        if tokenizer(text).input_ids == ids:
            return text
    raise MethodFault(
        "no text reads as this prompt's ids, and the server takes texts alone", "leave the row out"
    )


def read_output(
    session: PeerSession, reply: CompletionReply, fault: Callable[[str], Exception]
) -> list[int]:
    """Return the output's token ids, including an EOS that the engine does not return.

    Args:
        fault: Function that creates the error from a description of what the engine did.
    Raises:
        Exception: From `fault`: the reply is not an output of this prompt and this target.
    """
    request, tokenizer = session.requests[0], session.tokenizer
    most, eos, read = request.stop.max_new_tokens, request.stop.eos, reply.prompt_tokens
    if reply.finish is None:
        raise fault(f"ended its answer after {len(reply.ids)} tokens without saying why")
    if read not in (None, len(request.ids)):
        raise fault(f"read {read} tokens where the prompt has {len(request.ids)}")
    ids = list(reply.ids)
    if reply.text and not ids:
        ids = tokenizer(reply.text, add_special_tokens=False).input_ids
    received = len(ids)
    if reply.finish == "stop" and eos and eos.isdisjoint(ids[-1:]) and received < most:
        ids.append(tokenizer.eos_token_id if tokenizer.eos_token_id in eos else min(eos))
    if reply.tokens not in (None, received, len(ids)):
        raise fault(f"made {reply.tokens} tokens, and what it sent reads as {received}")
    if not ids:
        raise fault("answered with nothing")
    if max(ids) >= session.target.vocab_size:
        limit = session.target.vocab_size
        raise fault(f"made token {max(ids)}, and the target has {limit}: another model's")
    if received > most:
        raise fault(f"made {received} tokens where {most} were asked for")
    return ids


def report_output(session: PeerSession, reply: CompletionReply, ids: Sequence[int]) -> None:
    """Commit the output to the session, and report the engine's draft counts."""
    session.adopt_tokens(ids, reply.first_ns, reply.last_ns)
    if reply.drafted is not None and reply.accepted is not None:
        session.count(drafted=reply.drafted, accepted=reply.accepted)


def check_installed(name: str, package: str, engine: str, extra: str) -> None:
    """Raise EnvironmentFault, with the install command, if a package is not installed.

    Args:
        name: Name of the method that needs the package.
        package: Import name of the package.
        engine: Name of the engine in messages.
        extra: The extra of specbench that installs the package.
    """
    if find_spec(package) is None:
        raise EnvironmentFault(
            f"{name} decodes by {engine}, which is not installed",
            f"pip install 'specbench-cli[{extra}]'",
        )


_folders: WeakKeyDictionary[Any, dict[Hashable, Path]] = WeakKeyDictionary()
"""Folders with model files that an engine reads in place of a transformers module.

They are written at first use and removed with the module, or at the end of the program.
"""


def get_model_folder(module: Any, kind: Hashable, write: Callable[[Path], None]) -> Path:
    """Return the folder with a module's files, and write it at first use.

    Args:
        kind: Key of the files. A module may have several kinds.
        write: Function that writes the files to an empty folder.
    """
    folders = _folders.setdefault(module, {})
    if kind not in folders:
        folder = Path(tempfile.mkdtemp(prefix="specbench-engine-"))
        finalize(module, shutil.rmtree, folder, ignore_errors=True)
        write(folder)
        folders[kind] = folder
    return folders[kind]

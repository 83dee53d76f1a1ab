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
    """A completion as it is asked for: the prompt's ids, and the text that reads as these where it
    was asked for; `stops` are the ids that end it."""

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
    """What came back.

    ids: of the output, where the engine tells them; else its text. first_ns, last_ns: when the
    first and the last of it were there. finish: why it ended. prompt_tokens, tokens: how many the
    engine says that it read and made. drafted, accepted: tokens, where it counts them.
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
        """What changes with every piece of the output, an EOS that is not told included."""
        return len(self.ids), len(self.text), self.finish


def build_request(
    session: PeerSession, name: str, *, model: str | None = None, text: bool = False
) -> CompletionRequest:
    """The session's request in the words of servers.

    Args:
        name: the method that asks.
        model: which of the server's. text: whether it takes texts alone.
    Raises:
        MethodFault: it cannot be asked for this request, or by this rule.
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
    """Raise MethodFault where a request holds more than a text."""
    request = session.requests[0]
    if request.source is not None:
        raise MethodFault(
            f"{request.prompt_id} holds more than a text, which is all that {name} is given"
        )


def _decode_prompt(tokenizer: Any, ids: list[int]) -> str:
    """The text that a tokenizer reads as these ids, with or without a BOS that it adds itself."""
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
    """The output's ids, an EOS that the engine does not tell included.

    Args:
        fault: makes the error, of what the engine did.
    Raises:
        Exception: of `fault`: it is no output of this prompt and this target.
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
    """Give a session its output, and what the engine counted while it made it."""
    session.adopt_tokens(ids, reply.first_ns, reply.last_ns)
    if reply.drafted is not None and reply.accepted is not None:
        session.count(drafted=reply.drafted, accepted=reply.accepted)


def check_installed(name: str, package: str, engine: str, extra: str) -> None:
    """See that there is a package.

    Args:
        name: the method that needs it. engine: what it is called.
        extra: of specbench's, which installs it.
    Raises:
        EnvironmentFault: it is not installed; says how to.
    """
    if find_spec(package) is None:
        raise EnvironmentFault(
            f"{name} decodes by {engine}, which is not installed",
            f"pip install 'specbench-cli[{extra}]'",
        )


_folders: WeakKeyDictionary[Any, dict[Hashable, Path]] = WeakKeyDictionary()
"""Folders of files that engines read in place of a module of transformers. They are written at
first use and removed with the module or at the end of the program."""


def get_model_folder(module: Any, kind: Hashable, write: Callable[[Path], None]) -> Path:
    """The folder of a module's files.

    Args:
        kind: which files; the same module may have several.
        write: makes them, in an empty folder.
    """
    folders = _folders.setdefault(module, {})
    if kind not in folders:
        folder = Path(tempfile.mkdtemp(prefix="specbench-engine-"))
        finalize(module, shutil.rmtree, folder, ignore_errors=True)
        write(folder)
        folders[kind] = folder
    return folders[kind]

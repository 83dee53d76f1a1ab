"""transformers' own `generate` as a peer: plain, with a draft model, prompt lookup, and others.

Joao Gante: Assisted Generation, Hugging Face blog, May 2023 (`hf:assisted`). Apoorv Saxena: Prompt
Lookup Decoding, November 2023 (`hf:prompt-lookup`). Elhoushi et al., arXiv:2404.16710
(`hf:early-exit`). Chen et al., arXiv:2602.06036 (`hf:dflash`). They run transformers' own modules
with the same sampling, stop rule and noise as every other method; only the program differs.

The time covers all of `generate`. Its steps are reconstructed afterwards:

* A verification is one call of transformers' candidate generator. Its candidates are compared with
  the output. Candidates that transformers cuts off after an EOS or at the budget count as drafted,
  but not as tested.
* Our prefill commits the first token; transformers verifies its first candidates together with the
  prompt. This is reported as a prefill, which commits the first token, and a step with one draft
  token fewer. If that verification yields one token only, no step is reported.
"""

from __future__ import annotations

import contextlib
import copy
import warnings
from collections.abc import Iterator, Sequence
from dataclasses import asdict, replace
from typing import Any, ClassVar, cast

import torch
from torch import Tensor
from transformers import GenerationConfig, LogitsProcessor, StoppingCriteria
from transformers.utils import logging

from methods._heads.slots import make_rotary
from methods.dflash.head import DFlash
from specbench_cli.api import (
    Artifact,
    Draft,
    EnvironmentFault,
    Field,
    Method,
    MethodParams,
    Origin,
    Outcome,
    PeerSession,
    Sampling,
    Session,
    Step,
    StopRule,
    hash_key,
)

Proposal = tuple[int, Tensor]
"""Where in the output candidates were asked for, and their ids [m]."""


class HfVanilla(Method):
    """transformers' plain decoding; the others add candidates to it."""

    name: ClassVar[str] = "hf:vanilla"
    family: ClassVar[str] = "transformers"
    project: ClassVar[str] = "transformers"
    peer: ClassVar[bool] = True

    def generate(self, session: Session) -> Iterator[Step]:
        """All tokens in one call, then the steps they came in."""
        assert isinstance(session, PeerSession)
        prompt = session.pending_tokens(0).ids
        start = prompt.shape[1]
        source = session.requests[0].source
        if source is not None and source.ids:
            prompt = torch.tensor([source.ids], device=prompt.device)
        proposals: list[Proposal] = []
        module = self.prepare(_record_proposals(session.module("target"), start, proposals))
        with torch.inference_mode(), _silence(), _seed_generators(session):
            ids = module.generate(
                prompt,
                attention_mask=torch.ones_like(prompt),
                generation_config=_settings(session, **self.options(session)),
                **({} if source is None else source.images),
                **_extensions(session, start),
                **self.assistant(session),
            )
        output: list[int] = ids[0, start:].tolist()
        if not proposals:
            nothing = prompt.new_empty(0)
            proposals = [(at, nothing) for at in range(len(output))]
        yield from _report(session, output, proposals)

    def options(self, session: PeerSession) -> dict[str, Any]:
        """What this kind of decoding adds to the target's generation settings."""
        return {}

    def prepare(self, module: Any) -> Any:
        """The target's module, which holds no settings."""
        return module

    def assistant(self, session: PeerSession) -> dict[str, Any]:
        """The draft model, if there is one."""
        return {}


class HfAssistedParams(MethodParams):
    """Parameters of `HfAssisted`."""

    length: int = Field(5, ge=1, description="draft tokens a step (num_assistant_tokens), constant")


class HfAssisted(HfVanilla):
    """transformers' assisted generation: constant schedule, no stop at low confidence."""

    name: ClassVar[str] = "hf:assisted"
    Params: ClassVar[type[MethodParams]] = HfAssistedParams
    needs: ClassVar[frozenset[str]] = frozenset({"draft"})

    def assistant(self, session: PeerSession) -> dict[str, Any]:
        """The draft, whose own settings hold what transformers reads there."""
        draft = _copy_without_settings(session.module("draft"))
        return {
            "assistant_model": _set_constant_length(
                draft, cast(HfAssistedParams, self.params).length
            )
        }


class HfPromptLookupParams(MethodParams):
    """Parameters of `HfPromptLookup`."""

    length: int = Field(10, ge=1, description="draft tokens a step (prompt_lookup_num_tokens)")
    ngram: int = Field(2, ge=1, description="longest suffix looked up (max_matching_ngram_size)")


class HfPromptLookup(HfVanilla):
    """transformers' prompt lookup. It drafts past the budget: the last step may lack a bonus."""

    name: ClassVar[str] = "hf:prompt-lookup"
    Params: ClassVar[type[MethodParams]] = HfPromptLookupParams

    def options(self, session: PeerSession) -> dict[str, Any]:
        """transformers takes them with the target's settings."""
        params = cast(HfPromptLookupParams, self.params)
        return {"prompt_lookup_num_tokens": params.length, "max_matching_ngram_size": params.ngram}


class HfEarlyExitParams(MethodParams):
    """Parameters of `HfEarlyExit`."""

    length: int = Field(5, ge=1, description="draft tokens a step (num_assistant_tokens), constant")
    exit: int | None = Field(
        None, ge=1, description="first layers that draft (assistant_early_exit); default: half"
    )


class HfEarlyExit(HfVanilla):
    """transformers' early exit: the target's first layers are the assistant, with an own cache."""

    name: ClassVar[str] = "hf:early-exit"
    Params: ClassVar[type[MethodParams]] = HfEarlyExitParams

    def options(self, session: PeerSession) -> dict[str, Any]:
        """How many layers."""
        layers, chosen = session.target.n_layers, cast(HfEarlyExitParams, self.params).exit
        return {"assistant_early_exit": min(chosen or max(1, layers // 2), layers)}

    def prepare(self, module: Any) -> Any:
        """The target, which is its own assistant."""
        return _set_constant_length(module, cast(HfEarlyExitParams, self.params).length)


class HfDFlashParams(MethodParams):
    """Parameters of `HfDFlash`."""

    head: str = Field("auto", description="auto: the target's own; else the folder of one")


class HfDFlash(HfVanilla):
    """transformers' DFlash: its candidate generator with our head's weights in its own module."""

    name: ClassVar[str] = "hf:dflash"
    Params: ClassVar[type[MethodParams]] = HfDFlashParams
    needs: ClassVar[frozenset[str]] = frozenset({"head"})
    Head: ClassVar[type[Artifact]] = DFlash

    def options(self, session: PeerSession) -> dict[str, Any]:
        """The kind of candidates."""
        return {"speculation_type": "dflash"}

    def assistant(self, session: PeerSession) -> dict[str, Any]:
        """The head as transformers' module."""
        return {"assistant_model": dflash_module(session.artifact(*self.artifacts()))}


def dflash_module(head: DFlash) -> Any:
    """transformers' module of a DFlash head: what it has of the kind is Muse Glimmer's, whose
    tensors have other names in two places.

    Raises:
        EnvironmentFault: the installed transformers has none.
    """
    try:
        from transformers import MuseGlimmerAssistantConfig, MuseGlimmerAssistantModel
    except ImportError:
        raise EnvironmentFault(
            "this transformers has no DFlash drafter", "pip install 'transformers>=5.23'"
        ) from None
    config = MuseGlimmerAssistantConfig(
        **asdict(replace(head.shape, model_type=MuseGlimmerAssistantConfig.model_type)),
        layer_types=["full_attention"] * head.shape.num_hidden_layers,
        block_size=head.block,
        mask_token_id=head.mask,
        target_layer_ids=list(head.taps),
    )
    with torch.device("meta"):
        module: Any = MuseGlimmerAssistantModel(config)
    theirs = {"fc.weight": "encoder.fc.weight", "hidden_norm.weight": ENCODER_NORM}
    tensors = {theirs.get(name, name): tensor for name, tensor in head.state_dict().items()}
    module.load_state_dict(tensors, assign=True)
    module.rotary_emb = make_rotary(head.shape, head.rope)
    return module.requires_grad_(False).eval()


ENCODER_NORM = "encoder.output_norm_enc.weight"


class CoupledScores(LogitsProcessor):
    """Turns logits into decision scores, so that transformers' argmax is our coupled choice.

    transformers hands its processors to the assistant too, whose drafts so share the noise.
    """

    def __init__(self, session: Session, start: int) -> None:
        self._session = session
        self._start = start

    def __call__(self, input_ids: Tensor, scores: Tensor) -> Tensor:
        """Scores [1, V] at the output position that `input_ids` [1, n] has come to."""
        return self._session.scores(scores, input_ids.shape[1] - self._start)


class RunStopCriteria(StoppingCriteria):
    """The run's stop rule, for the stop strings that transformers' settings do not hold."""

    def __init__(self, stop: StopRule, start: int) -> None:
        self._stop = stop
        self._start = start
        self._seen = 0
        self._done = False

    def __call__(self, input_ids: Tensor, scores: Any, **kwargs: Any) -> Tensor:
        """Whether the one sequence [1, n] has ended, as [1] bool."""
        output = input_ids[0, self._start :].tolist()
        if not self._done:
            _, finish = self._stop.cut(output[: self._seen], output[self._seen :])
            self._done = finish is not None
            self._seen = len(output)
        return torch.tensor([self._done], device=input_ids.device)


def _copy_without_settings(module: Any) -> Any:
    """The module without its checkpoint's generation settings.

    It is a second object around the same weights: the module itself stays as it is.
    """
    module = copy.copy(module)
    module.generation_config = GenerationConfig()
    return module


def _set_constant_length(module: Any, length: int) -> Any:
    """A bare module that drafts so many tokens a step, whatever its confidence."""
    module.generation_config.update(
        num_assistant_tokens=length,
        num_assistant_tokens_schedule="constant",
        assistant_confidence_threshold=0.0,
    )
    return module


def _record_proposals(module: Any, start: int, proposals: list[Proposal]) -> Any:
    """The bare module, noting what its candidate generator proposes after `start` prompt tokens."""
    module = _copy_without_settings(module)
    create = module._get_candidate_generator

    def created(**kwargs: Any) -> Any:
        generator = create(**kwargs)
        propose = generator.get_candidates

        def get_candidates(input_ids: Tensor, **kwargs: Any) -> tuple[Tensor, Tensor | None]:
            ids, logits = propose(input_ids, **kwargs)
            length = input_ids.shape[1]
            proposals.append((length - start, ids[0, length:]))
            return ids, logits

        generator.get_candidates = get_candidates
        return generator

    module._get_candidate_generator = created
    return module


def _settings(session: Session, **options: Any) -> GenerationConfig:
    """The session's decoding rule in transformers' words; all else is the library's default."""
    request = session.requests[0]
    stop = request.stop
    eos = sorted(stop.eos)
    if request.source is not None and request.source.ids:
        options["decoder_start_token_id"] = request.ids[0]
    return GenerationConfig(
        max_new_tokens=stop.max_new_tokens,
        eos_token_id=eos or None,
        pad_token_id=eos[0] if eos else None,
        use_cache=True,
        num_beams=1,
        **_distribution(session.sampling),
        **options,
    )


def _distribution(sampling: Sampling) -> dict[str, Any]:
    if not sampling.draws:
        return {"do_sample": False}
    return {
        "do_sample": True,
        "temperature": sampling.temperature,
        "top_k": sampling.top_k,
        "top_p": sampling.top_p,
    }


def _extensions(session: Session, start: int) -> dict[str, Any]:
    """The noise and the stop strings, where the run has them."""
    extensions: dict[str, Any] = {}
    if session.sampling.rule == "coupled":
        extensions["logits_processor"] = [CoupledScores(session, start)]
    stop = session.requests[0].stop
    if stop.strings:
        extensions["stopping_criteria"] = [RunStopCriteria(stop, start)]
    return extensions


def _report(
    session: PeerSession, output: list[int], proposals: Sequence[Proposal]
) -> Iterator[Step]:
    """Hand the output over in the pieces it came in."""
    starts = [start for start, _ in proposals]
    for (start, candidates), end in zip(proposals, [*starts[1:], len(output)], strict=True):
        ahead = 0
        if start == 0:
            session.adopt(Outcome((), (output[0],), ("prefill",), 0))
            ahead = 1
        new = output[start + ahead : end]
        if session.finish is None and new:
            draft = Draft(candidates[ahead:])
            yield Step(seq=0, draft=draft, outcome=session.adopt(_outcome(draft, new)))


def _outcome(draft: Draft, new: Sequence[int]) -> Outcome:
    m = draft.nodes
    # Whatever replaces a rejected token differs from it, so equal ids are accepted ones.
    pairs = enumerate(zip(draft.tokens.tolist(), new, strict=False))
    n = next((i for i, (proposed, kept) in pairs if proposed != kept), min(m, len(new)))
    last: Origin = "plain" if m == 0 else "bonus" if n == m else "recovered"
    accepted: list[Origin] = ["accepted"] * n
    return Outcome(
        path=tuple(range(n)),
        committed=tuple(new),
        origin=tuple([*accepted, last][: len(new)]),
        tested=min(n + 1, m, len(new)),
    )


@contextlib.contextmanager
def _silence() -> Iterator[None]:
    """Neither log lines nor warnings: the settings are ours, so they say nothing to the user."""
    level = logging.get_verbosity()
    logging.set_verbosity_error()
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            yield
    finally:
        logging.set_verbosity(level)


@contextlib.contextmanager
def _seed_generators(session: PeerSession) -> Iterator[None]:
    """torch's global generators, which transformers draws from, seeded by what is decoded.

    Afterwards they are as they were.
    """
    if not session.sampling.draws:
        yield
        return
    request = session.requests[0]
    cuda = [session.device] if session.device.type == "cuda" else []
    with torch.random.fork_rng(devices=cuda):
        key = hash_key("hf", session.sampling.seed, request.prompt_id, request.turn, session.pass_)
        torch.manual_seed(key >> 1)
        yield

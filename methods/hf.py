"""Methods that decode with `generate` of transformers, for comparison with specbench's methods.

Joao Gante: Assisted Generation, Hugging Face blog, May 2023 (`hf:assisted`). Apoorv Saxena: Prompt
Lookup Decoding, November 2023 (`hf:prompt-lookup`). Elhoushi et al., arXiv:2404.16710
(`hf:early-exit`). Chen et al., arXiv:2602.06036 (`hf:dflash`). These methods run transformers'
models and decoding loop. The sampling, the stop rule and the random noise are the same as in all
other methods.

specbench measures the time of the whole `generate` call. It reconstructs the decoding steps
afterwards:

* A verification is one call of transformers' candidate generator. specbench compares its candidate
  tokens with the output. Candidates that transformers cuts off after an EOS or at the token budget
  count as drafted, but not as tested.
* In specbench, the prefill commits the first token. transformers verifies its first candidates
  together with the prompt. specbench reports this first verification as a prefill and a step with
  one draft token fewer. If the first verification yields only one token, specbench reports no step.
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
"""Position in the output at which transformers generated draft candidates, and their ids [m]."""


class HfVanilla(Method):
    """transformers' plain decoding, and the base class of the other transformers methods."""

    name: ClassVar[str] = "hf:vanilla"
    family: ClassVar[str] = "transformers"
    project: ClassVar[str] = "transformers"
    peer: ClassVar[bool] = True

    def generate(self, session: Session) -> Iterator[Step]:
        """Decode the request in one call of `generate`, then yield the reconstructed steps."""
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
        """Return generation settings of this method in addition to the common ones."""
        return {}

    def prepare(self, module: Any) -> Any:
        """Return the module of the target with the changes that this method needs.

        The generation settings of the module are empty.
        """
        return module

    def assistant(self, session: PeerSession) -> dict[str, Any]:
        """Return the arguments of `generate` that pass a draft model. Plain decoding has none."""
        return {}


class HfAssistedParams(MethodParams):
    """Parameters of `HfAssisted`."""

    length: int = Field(
        5,
        ge=1,
        description="number of draft tokens per step (num_assistant_tokens), always the same",
    )


class HfAssisted(HfVanilla):
    """transformers' assisted generation with a draft model and a constant draft length."""

    name: ClassVar[str] = "hf:assisted"
    Params: ClassVar[type[MethodParams]] = HfAssistedParams
    needs: ClassVar[frozenset[str]] = frozenset({"draft"})

    def assistant(self, session: PeerSession) -> dict[str, Any]:
        """Return the draft model. Its generation settings contain the draft length."""
        draft = _copy_without_settings(session.module("draft"))
        return {
            "assistant_model": _set_constant_length(
                draft, cast(HfAssistedParams, self.params).length
            )
        }


class HfPromptLookupParams(MethodParams):
    """Parameters of `HfPromptLookup`."""

    length: int = Field(
        10, ge=1, description="number of draft tokens per step (prompt_lookup_num_tokens)"
    )
    ngram: int = Field(
        2,
        ge=1,
        description="maximum length of the suffix to look up, in tokens (max_matching_ngram_size)",
    )


class HfPromptLookup(HfVanilla):
    """transformers' prompt lookup decoding. The last step may have no bonus token."""

    name: ClassVar[str] = "hf:prompt-lookup"
    Params: ClassVar[type[MethodParams]] = HfPromptLookupParams

    def options(self, session: PeerSession) -> dict[str, Any]:
        """Return the generation settings of prompt lookup."""
        params = cast(HfPromptLookupParams, self.params)
        return {"prompt_lookup_num_tokens": params.length, "max_matching_ngram_size": params.ngram}


class HfEarlyExitParams(MethodParams):
    """Parameters of `HfEarlyExit`."""

    length: int = Field(
        5,
        ge=1,
        description="number of draft tokens per step (num_assistant_tokens), always the same",
    )
    exit: int | None = Field(
        None,
        ge=1,
        description="number of first layers that draft (assistant_early_exit); by default half"
        " of the layers",
    )


class HfEarlyExit(HfVanilla):
    """transformers' early exit: the target's first layers draft, with a separate KV cache."""

    name: ClassVar[str] = "hf:early-exit"
    Params: ClassVar[type[MethodParams]] = HfEarlyExitParams

    def options(self, session: PeerSession) -> dict[str, Any]:
        """Return the exit layer as a generation setting."""
        layers, chosen = session.target.n_layers, cast(HfEarlyExitParams, self.params).exit
        return {"assistant_early_exit": min(chosen or max(1, layers // 2), layers)}

    def prepare(self, module: Any) -> Any:
        """Return the module of the target. Its generation settings contain the draft length."""
        return _set_constant_length(module, cast(HfEarlyExitParams, self.params).length)


class HfDFlashParams(MethodParams):
    """Parameters of `HfDFlash`."""

    head: str = Field(
        "auto",
        description="draft head: auto (the default head of the target), a folder or a hub id",
    )


class HfDFlash(HfVanilla):
    """transformers' DFlash. The transformers module gets the weights of specbench's DFlash head."""

    name: ClassVar[str] = "hf:dflash"
    Params: ClassVar[type[MethodParams]] = HfDFlashParams
    needs: ClassVar[frozenset[str]] = frozenset({"head"})
    Head: ClassVar[type[Artifact]] = DFlash

    def options(self, session: PeerSession) -> dict[str, Any]:
        """Return the generation setting that selects DFlash."""
        return {"speculation_type": "dflash"}

    def assistant(self, session: PeerSession) -> dict[str, Any]:
        """Return the DFlash head as a transformers module."""
        return {"assistant_model": dflash_module(session.artifact(*self.artifacts()))}


def dflash_module(head: DFlash) -> Any:
    """Return a DFlash head as a transformers module.

    transformers implements DFlash as the assistant of the model Muse Glimmer. Two tensors have
    other names in transformers than in the checkpoint.

    Raises:
        EnvironmentFault: The installed transformers version has no DFlash module.
    """
    try:
        from transformers import MuseGlimmerAssistantConfig, MuseGlimmerAssistantModel
    except ImportError:
        raise EnvironmentFault(
            "the installed version of transformers has no DFlash",
            "pip install 'transformers>=5.23'",
        ) from None
    config = MuseGlimmerAssistantConfig(
        **asdict(replace(head.shape, model_type=MuseGlimmerAssistantConfig.model_type)),
        layer_types=["full_attention"] * head.shape.num_hidden_layers,
        block_size=head.block,
        mask_token_id=head.mask,
        target_layer_ids=list(head.captured_layers),
    )
    with torch.device("meta"):
        module: Any = MuseGlimmerAssistantModel(config)
    renames = {"fc.weight": "encoder.fc.weight", "hidden_norm.weight": ENCODER_NORM}
    tensors = {renames.get(name, name): tensor for name, tensor in head.state_dict().items()}
    module.load_state_dict(tensors, assign=True)
    module.rotary_emb = make_rotary(head.shape, head.rope)
    return module.requires_grad_(False).eval()


ENCODER_NORM = "encoder.output_norm_enc.weight"


class CoupledScores(LogitsProcessor):
    """Logits processor for coupled sampling: adds Gumbel noise keyed by seed and position.

    With this noise, the argmax is the same token as in specbench's other methods. transformers
    passes the processor also to the draft model, so that drafts use the same noise.
    """

    def __init__(self, session: Session, start: int) -> None:
        self._session = session
        self._start = start

    def __call__(self, input_ids: Tensor, scores: Tensor) -> Tensor:
        """Return the scores [1, vocab] with the noise for the position after `input_ids` [1, n]."""
        return self._session.scores(scores, input_ids.shape[1] - self._start)


class RunStopCriteria(StoppingCriteria):
    """Stopping criterion for runs with stop strings: the stop rule of the run."""

    def __init__(self, stop: StopRule, start: int) -> None:
        self._stop = stop
        self._start = start
        self._seen = 0
        self._done = False

    def __call__(self, input_ids: Tensor, scores: Any, **kwargs: Any) -> Tensor:
        """Return True, as a tensor [1], if the sequence `input_ids` [1, n] has ended."""
        output = input_ids[0, self._start :].tolist()
        if not self._done:
            _, finish = self._stop.truncate(output[: self._seen], output[self._seen :])
            self._done = finish is not None
            self._seen = len(output)
        return torch.tensor([self._done], device=input_ids.device)


def _copy_without_settings(module: Any) -> Any:
    """Return a shallow copy of the module without the generation settings of its checkpoint.

    The copy shares the weights. The module itself does not change.
    """
    module = copy.copy(module)
    module.generation_config = GenerationConfig()
    return module


def _set_constant_length(module: Any, length: int) -> Any:
    """Set a constant draft length in the generation settings of a module, and return the module."""
    module.generation_config.update(
        num_assistant_tokens=length,
        num_assistant_tokens_schedule="constant",
        assistant_confidence_threshold=0.0,
    )
    return module


def _record_proposals(module: Any, start: int, proposals: list[Proposal]) -> Any:
    """Return a copy of the module that records its draft tokens.

    Args:
        module: transformers module of the target.
        start: Length of the prompt.
        proposals: List to which each proposal of the candidate generator is appended.
    """
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
    """Return the session's sampling options and stop rule as transformers' generation settings.

    Other settings have transformers' defaults.
    """
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
    """Return arguments of `generate`: the logits processor and the stopping criteria of the run."""
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
    """Commit the output to the session, and yield one step per verification."""
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
    # Count the accepted tokens. Equal ids are accepted tokens, because a replacement always differs
    # from the rejected token.
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
    """Suppress transformers' warnings about settings that the user cannot change."""
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
    """Seed torch's global random generators from the request, because transformers uses them.

    Restore the generators afterwards.
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

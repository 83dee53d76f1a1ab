"""OpenVINO GenAI as an engine: plain decoding, a draft model, prompt lookup; on the processor.

github.com/openvinotoolkit/openvino.genai. It runs the very weights of the run's models, in float32,
on as many threads: `methods._engines.openvino` makes its models of transformers' modules before the
first prompt. The time is the whole of its `generate`, the first token's what it says itself.
"""

from __future__ import annotations

from collections.abc import Iterator
from functools import cached_property
from importlib import import_module
from typing import Any, ClassVar, Literal

import numpy as np

from methods._engines import openvino
from specbench_cli.api import (
    Field,
    Method,
    MethodFault,
    MethodParams,
    PeerSession,
    Session,
    Step,
)


class OpenVinoParams(MethodParams):
    """Parameters of `OpenVino`."""

    attention: Literal["PA", "SDPA"] | None = Field(
        None, description="its attention back end, paged or not (ATTENTION_BACKEND); default: its"
    )


class OpenVino(Method):
    """OpenVINO GenAI's plain decoding: the baseline of its other rows."""

    name: ClassVar[str] = "engine:openvino"
    Params: ClassVar[type[MethodParams]] = OpenVinoParams
    peer: ClassVar[bool] = True
    baseline: ClassVar[str] = "engine:openvino"
    _pipeline: Any = None

    def check(self) -> None:
        """See that it is installed."""
        openvino.check_installed(self.name)

    def pipeline(self, session: PeerSession) -> Any:
        """What decodes: made once."""
        chosen = self.params.attention
        more = {} if chosen is None else {"ATTENTION_BACKEND": chosen}
        return openvino.pipeline(session.tokenizer, session.module("target"), **more)

    def options(self) -> dict[str, Any]:
        """What this kind of decoding adds to the settings."""
        return {}

    def generate(self, session: Session) -> Iterator[Step]:
        """All tokens in one call; no step is told."""
        assert isinstance(session, PeerSession)
        request, stop = session.requests[0], session.requests[0].stop
        if session.sampling.draws or request.source is not None:
            raise MethodFault(f"{self.name} decodes texts greedily alone", "--temperature 0")
        if self._pipeline is None:
            self._pipeline = self.pipeline(session)
        settings = self._genai.GenerationConfig(
            max_new_tokens=stop.max_new_tokens,
            stop_token_ids=set(stop.eos),
            ignore_eos=not stop.eos,
            do_sample=False,
            **self.options(),
        )
        began = session.now()
        prompt = self._core.Tensor(np.array([request.ids], dtype=np.int64))
        said = self._pipeline.generate(prompt, settings)
        ended = session.now()
        first = began + round(said.perf_metrics.get_ttft().mean * 1e6)
        session.adopt_tokens(said.tokens[0], min(first, ended), ended)
        counted = said.extended_perf_metrics
        if counted is not None:
            session.count(
                drafted=counted.draft_model_metrics.get_num_generated_tokens(),
                accepted=counted.get_num_accepted_tokens(),
            )
        yield from ()

    @cached_property
    def _genai(self) -> Any:
        return import_module("openvino_genai")

    @cached_property
    def _core(self) -> Any:
        return import_module("openvino")


class OpenVinoDraftParams(MethodParams):
    """Parameters of `OpenVinoDraft`."""

    length: int = Field(5, ge=1, description="draft tokens a step (num_assistant_tokens)")


class OpenVinoDraft(OpenVino):
    """OpenVINO GenAI's speculative decoding with a draft model, of constant length."""

    name: ClassVar[str] = "engine:openvino-draft"
    Params: ClassVar[type[MethodParams]] = OpenVinoDraftParams
    needs: ClassVar[frozenset[str]] = frozenset({"draft"})

    def pipeline(self, session: PeerSession) -> Any:
        """With the run's draft."""
        return openvino.pipeline(
            session.tokenizer, session.module("target"), session.module("draft")
        )

    def options(self) -> dict[str, Any]:
        """How many tokens."""
        return {"num_assistant_tokens": self.params.length}


class OpenVinoLookupParams(MethodParams):
    """Parameters of `OpenVinoLookup`."""

    length: int = Field(5, ge=1, description="draft tokens a step (num_assistant_tokens)")
    ngram: int = Field(3, ge=1, description="longest suffix looked up (max_ngram_size)")


class OpenVinoLookup(OpenVino):
    """OpenVINO GenAI's prompt lookup, which counts nothing."""

    name: ClassVar[str] = "engine:openvino-lookup"
    Params: ClassVar[type[MethodParams]] = OpenVinoLookupParams

    def pipeline(self, session: PeerSession) -> Any:
        """With lookup."""
        return openvino.pipeline(session.tokenizer, session.module("target"), prompt_lookup=True)

    def options(self) -> dict[str, Any]:
        """How many tokens, behind which suffix."""
        return {
            "num_assistant_tokens": self.params.length,
            "max_ngram_size": self.params.ngram,
        }

"""Methods that decode with OpenVINO GenAI on the CPU: plain decoding, a draft model, prompt lookup.

They use github.com/openvinotoolkit/openvino.genai. The weights are those of the run's models, in
float32, and the number of threads is that of torch. The module `pipeline` converts transformers'
modules before the first prompt. The total time is that of OpenVINO's `generate`, and OpenVINO
reports the time of the first token.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any, ClassVar, Literal

from methods._engines import check_installed, check_text, report_output
from methods.engine_openvino import pipeline
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
        None,
        description="attention backend (ATTENTION_BACKEND): paged (PA) or not (SDPA); by"
        " default OpenVINO's choice",
    )


class OpenVino(Method):
    """OpenVINO GenAI's plain decoding: the baseline of its other methods."""

    name: ClassVar[str] = "engine:openvino"
    family: ClassVar[str] = "OpenVINO GenAI"
    project: ClassVar[str] = "github.com/openvinotoolkit/openvino.genai"
    Params: ClassVar[type[MethodParams]] = OpenVinoParams
    peer: ClassVar[bool] = True
    baseline: ClassVar[str] = "engine:openvino"
    _pipeline: Any = None

    def check(self) -> None:
        """Raise EnvironmentFault if the package is not installed."""
        check_installed(self.name, "openvino_genai", "OpenVINO GenAI", "openvino")

    def create_pipeline(self, session: PeerSession) -> Any:
        """Return the pipeline. `generate` calls this once per method."""
        chosen = self.params.attention
        more = {} if chosen is None else {"ATTENTION_BACKEND": chosen}
        return pipeline.create_pipeline(session.tokenizer, session.module("target"), **more)

    def options(self) -> dict[str, Any]:
        """Return further generation settings of this method."""
        return {}

    def generate(self, session: Session) -> Iterator[Step]:
        """Decode the request. No steps are yielded, because OpenVINO does not report them."""
        assert isinstance(session, PeerSession)
        check_text(session, self.name)
        if session.sampling.draws:
            raise MethodFault(f"{self.name} supports only greedy decoding", "use --temperature 0")
        if self._pipeline is None:
            self._pipeline = self.create_pipeline(session)
        reply = pipeline.decode(self._pipeline, session, **self.options())
        report_output(session, reply, reply.ids)
        yield from ()


class OpenVinoDraftParams(MethodParams):
    """Parameters of `OpenVinoDraft`."""

    length: int = Field(
        5, ge=1, description="number of draft tokens per step (num_assistant_tokens)"
    )


class OpenVinoDraft(OpenVino):
    """OpenVINO GenAI's speculative decoding with a draft model, of constant length."""

    name: ClassVar[str] = "engine:openvino-draft"
    Params: ClassVar[type[MethodParams]] = OpenVinoDraftParams
    needs: ClassVar[frozenset[str]] = frozenset({"draft"})

    def create_pipeline(self, session: PeerSession) -> Any:
        """Return a pipeline with the run's draft."""
        return pipeline.create_pipeline(
            session.tokenizer, session.module("target"), session.module("draft")
        )

    def options(self) -> dict[str, Any]:
        """Return the draft length."""
        return {"num_assistant_tokens": self.params.length}


class OpenVinoLookupParams(MethodParams):
    """Parameters of `OpenVinoLookup`."""

    length: int = Field(
        5, ge=1, description="number of draft tokens per step (num_assistant_tokens)"
    )
    ngram: int = Field(
        3, ge=1, description="maximum length of the suffix to look up, in tokens (max_ngram_size)"
    )


class OpenVinoLookup(OpenVino):
    """OpenVINO GenAI's prompt lookup; it reports no draft counts."""

    name: ClassVar[str] = "engine:openvino-lookup"
    Params: ClassVar[type[MethodParams]] = OpenVinoLookupParams

    def create_pipeline(self, session: PeerSession) -> Any:
        """Return a pipeline with prompt lookup."""
        return pipeline.create_pipeline(
            session.tokenizer, session.module("target"), prompt_lookup=True
        )

    def options(self) -> dict[str, Any]:
        """Return the draft length and the longest suffix."""
        return {
            "num_assistant_tokens": self.params.length,
            "max_ngram_size": self.params.ngram,
        }

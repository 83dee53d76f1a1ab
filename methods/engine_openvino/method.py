"""Methods that decode with OpenVINO GenAI on the CPU: plain decoding, a draft model, prompt lookup.

The methods use github.com/openvinotoolkit/openvino.genai. They decode with the same models as the
run, in float32, and with as many threads as torch. The models are converted before the first
prompt. The total time is the time of OpenVINO's `generate`. OpenVINO itself reports the time to
first token.
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
    """Plain decoding with OpenVINO GenAI: the baseline of the other OpenVINO methods."""

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
        """Return the OpenVINO pipeline. `generate` calls this method only for the first request."""
        chosen = self.params.attention
        more = {} if chosen is None else {"ATTENTION_BACKEND": chosen}
        return pipeline.create_pipeline(session.tokenizer, session.module("target"), **more)

    def options(self) -> dict[str, Any]:
        """Return generation settings of this method in addition to the common ones."""
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
    """Speculative decoding with OpenVINO GenAI, with a draft model and a fixed draft length."""

    name: ClassVar[str] = "engine:openvino-draft"
    Params: ClassVar[type[MethodParams]] = OpenVinoDraftParams
    needs: ClassVar[frozenset[str]] = frozenset({"draft"})

    def create_pipeline(self, session: PeerSession) -> Any:
        """Return a pipeline that drafts with the draft model of the run."""
        return pipeline.create_pipeline(
            session.tokenizer, session.module("target"), session.module("draft")
        )

    def options(self) -> dict[str, Any]:
        """Return the draft length as a generation setting."""
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
    """Prompt lookup with OpenVINO GenAI, which reports no draft counts."""

    name: ClassVar[str] = "engine:openvino-lookup"
    Params: ClassVar[type[MethodParams]] = OpenVinoLookupParams

    def create_pipeline(self, session: PeerSession) -> Any:
        """Return a pipeline that drafts by prompt lookup."""
        return pipeline.create_pipeline(
            session.tokenizer, session.module("target"), prompt_lookup=True
        )

    def options(self) -> dict[str, Any]:
        """Return the draft length and the maximum length of the matched suffix as generation
        settings.
        """
        return {
            "num_assistant_tokens": self.params.length,
            "max_ngram_size": self.params.ngram,
        }

"""Methods that decode with llama.cpp on the CPU: plain decoding, a draft model, prompt lookup.

The methods use github.com/ggml-org/llama.cpp through its Python binding,
github.com/abetlen/llama-cpp-python. They decode with the same models as the run, in float32, and
with as many threads as torch. The weights are written to GGUF files before the first prompt. The
time of a token is the time at which the binding's generator yields it.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import ClassVar

from methods._engines import check_installed, check_text, report_output
from methods.engine_llamacpp import binding
from specbench_cli.api import (
    Field,
    Method,
    MethodFault,
    MethodParams,
    PeerSession,
    Session,
    Step,
)


class LlamaCppParams(MethodParams):
    """Parameters of `LlamaCpp`."""

    flash: bool = Field(False, description="use flash attention (flash_attn)")


class LlamaCpp(Method):
    """Plain decoding with llama.cpp: the baseline of the other llama.cpp methods."""

    name: ClassVar[str] = "engine:llama.cpp"
    family: ClassVar[str] = "llama.cpp"
    project: ClassVar[str] = "github.com/abetlen/llama-cpp-python"
    Params: ClassVar[type[MethodParams]] = LlamaCppParams
    peer: ClassVar[bool] = True
    baseline: ClassVar[str] = "engine:llama.cpp"
    _engine: binding.LlamaCppEngine | None = None

    def check(self) -> None:
        """Raise EnvironmentFault if the package is not installed."""
        check_installed(self.name, "llama_cpp", "llama-cpp-python", "llamacpp")

    def create_engine(self, session: PeerSession) -> binding.LlamaCppEngine:
        """Return the engine with its models.

        `generate` calls this method only for the first request.
        """
        return binding.LlamaCppEngine(
            binding.load_model(session, "target", flash_attn=self.params.flash)
        )

    def generate(self, session: Session) -> Iterator[Step]:
        """Decode the request. No steps are yielded, because the binding does not report them."""
        assert isinstance(session, PeerSession)
        check_text(session, self.name)
        if session.sampling.draws:
            raise MethodFault(f"{self.name} supports only greedy decoding", "use --temperature 0")
        if self._engine is None:
            self._engine = self.create_engine(session)
        reply = binding.decode(self._engine, session)
        report_output(session, reply, reply.ids)
        yield from ()


class LlamaCppDraftParams(LlamaCppParams):
    """Parameters of `LlamaCppDraft`."""

    length: int = Field(5, ge=1, description="number of draft tokens per step")


class LlamaCppDraft(LlamaCpp):
    """Speculative decoding with llama.cpp, with a draft model and a fixed draft length."""

    name: ClassVar[str] = "engine:llama.cpp-draft"
    Params: ClassVar[type[MethodParams]] = LlamaCppDraftParams
    needs: ClassVar[frozenset[str]] = frozenset({"draft"})

    def create_engine(self, session: PeerSession) -> binding.LlamaCppEngine:
        """Return an engine that drafts with the draft model of the run."""
        flash, length = self.params.flash, self.params.length
        draft = binding.load_model(session, "draft", ahead=length, flash_attn=flash)
        drafting = binding.make_model_drafter(draft, length)
        target = binding.load_model(
            session, "target", ahead=length, flash_attn=flash, logits_all=True, draft_model=drafting
        )
        return binding.LlamaCppEngine(target, drafting, draft)


class LlamaCppLookupParams(LlamaCppParams):
    """Parameters of `LlamaCppLookup`."""

    length: int = Field(10, ge=1, description="number of draft tokens per step (num_pred_tokens)")
    ngram: int = Field(
        2, ge=1, description="maximum length of the suffix to look up, in tokens (max_ngram_size)"
    )


class LlamaCppLookup(LlamaCpp):
    """Prompt lookup with llama-cpp-python."""

    name: ClassVar[str] = "engine:llama.cpp-lookup"
    Params: ClassVar[type[MethodParams]] = LlamaCppLookupParams

    def create_engine(self, session: PeerSession) -> binding.LlamaCppEngine:
        """Return an engine that drafts by prompt lookup."""
        drafting = binding.make_lookup_drafter(self.params.ngram, self.params.length)
        target = binding.load_model(
            *(session, "target"),
            ahead=self.params.length,
            flash_attn=self.params.flash,
            logits_all=True,
            draft_model=drafting,
        )
        return binding.LlamaCppEngine(target, drafting)

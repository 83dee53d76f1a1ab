"""transformers' own module of a target, read as its family is: what outputs are judged by."""

from __future__ import annotations

import inspect
from collections.abc import Iterator, Sequence
from typing import Any

import torch
from torch import Tensor

from specbench_cli.engine.types import ExtraInput


class Oracle:
    """Logits of texts, and nothing of ours in them.

    Args:
        module: a language model of transformers, in eval mode: causal, sequence-to-sequence or
            image-text.
    """

    def __init__(self, module: Any) -> None:
        self.module, self.device = module, module.device
        self._takes = set(inspect.signature(module.forward).parameters)
        self._encodes = "decoder_input_ids" in self._takes
        known = ("cache", "cache_params", "past_key_values")  # transformers 5.24, and before it
        self._keeps = next((name for name in known if name in self._takes), known[-1])

    @torch.inference_mode()
    def logits(self, text: Sequence[int], source: ExtraInput | None, last: int) -> Tensor:
        """Those of the last tokens, [last, V] float32, by one forward."""
        few = {"logits_to_keep": last} if "logits_to_keep" in self._takes else {}
        out = self.module(**self._inputs(text, source), **few)
        rows: Tensor = out.logits[0, -last:].float()
        return rows

    @torch.inference_mode()
    def one_by_one(self, text: Sequence[int], source: ExtraInput | None) -> Iterator[Tensor]:
        """Those of each token, [V] float32, by forwards over one token each, with the module's own
        cache."""
        name, fixed = "input_ids", {}
        if self._encodes:
            read = self._inputs(text, source)["input_ids"]
            name, fixed = (
                "decoder_input_ids",
                {"encoder_outputs": self.module.get_encoder()(input_ids=read)},
            )
        cache = None
        for token in self._line(text).split(1, 1):
            out = self.module(**{name: token, self._keeps: cache}, **fixed, use_cache=True)
            cache = getattr(out, self._keeps)
            yield out.logits[0, -1].float()

    def itself(self, text: Sequence[int]) -> ExtraInput | None:
        """Something to read beside a text that is read for its own sake."""
        return ExtraInput(ids=tuple(text)) if self._encodes else None

    def _inputs(self, text: Sequence[int], source: ExtraInput | None) -> dict[str, Any]:
        if self._encodes:
            read = () if source is None else source.ids
            return {"input_ids": self._line(read), "decoder_input_ids": self._line(text)}
        return {"input_ids": self._line(text), **({} if source is None else source.images)}

    def _line(self, ids: Sequence[int]) -> Tensor:
        return torch.tensor([list(ids)], device=self.device)

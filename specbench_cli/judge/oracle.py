"""Oracle: the transformers model of the target. The judge compares outputs with its logits.

The oracle shares no code with the engine that is being judged (`judge.verdict`).
"""

from __future__ import annotations

import inspect
from collections.abc import Iterator, Sequence
from typing import Any

import torch
from torch import Tensor

from specbench_cli.engine.types import ExtraInput


class Oracle:
    """Wrapper of a transformers model that returns the logits of a text.

    Args:
        module: A language model of transformers in eval mode. It may be causal,
            sequence-to-sequence or image-text.
    """

    def __init__(self, module: Any) -> None:
        self.module, self.device = module, module.device
        self._parameters = set(inspect.signature(module.forward).parameters)
        self._encodes = "decoder_input_ids" in self._parameters
        # The argument of `forward` that takes the KV cache has different names, depending on the
        # version of transformers and on the model.
        known = ("cache", "cache_params", "past_key_values")
        self._cache_name = next((name for name in known if name in self._parameters), known[-1])

    @torch.inference_mode()
    def logits(self, text: Sequence[int], source: ExtraInput | None, last: int) -> Tensor:
        """Return the logits of the last tokens, from one forward over the whole text.

        Args:
            text: Token ids. For an encoder-decoder model, they are the decoder's token ids.
            source: Input of the encoder, or images. None for a text-only decoder.
            last: Number of last tokens whose logits are returned.

        Returns:
            [last, vocab] float32.
        """
        few = {"logits_to_keep": last} if "logits_to_keep" in self._parameters else {}
        out = self.module(**self._inputs(text, source), **few)
        rows: Tensor = out.logits[0, -last:].float()
        return rows

    @torch.inference_mode()
    def stepwise_logits(self, text: Sequence[int], source: ExtraInput | None) -> Iterator[Tensor]:
        """Yield the logits [vocab] float32 of each token.

        Each token is read in its own cached forward.
        """
        name, fixed = "input_ids", {}
        if self._encodes:
            read = self._inputs(text, source)["input_ids"]
            name, fixed = (
                "decoder_input_ids",
                {"encoder_outputs": self.module.get_encoder()(input_ids=read)},
            )
        cache = None
        for token in self._tensor(text).split(1, 1):
            out = self.module(**{name: token, self._cache_name: cache}, **fixed, use_cache=True)
            cache = getattr(out, self._cache_name)
            yield out.logits[0, -1].float()

    def self_source(self, text: Sequence[int]) -> ExtraInput | None:
        """Return the text as an input of the encoder.

        Return None for a model without an encoder.
        """
        return ExtraInput(ids=tuple(text)) if self._encodes else None

    def _inputs(self, text: Sequence[int], source: ExtraInput | None) -> dict[str, Any]:
        if self._encodes:
            read = () if source is None else source.ids
            return {"input_ids": self._tensor(read), "decoder_input_ids": self._tensor(text)}
        return {"input_ids": self._tensor(text), **({} if source is None else source.images)}

    def _tensor(self, ids: Sequence[int]) -> Tensor:
        return torch.tensor([list(ids)], device=self.device)

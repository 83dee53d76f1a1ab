"""A target's own answers to training questions: what its draft has to agree with.

Sampled at temperature 1 (DistillSpec, Zhou et al., ICLR 2024, arXiv:2310.08461, trains on samples
of the models, not on the data alone), or greedy. Kept as JSON lines, so that a stopped run goes on
where it was.
"""

import json
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import torch
from transformers import LlamaForCausalLM

from specbench_cli.training.corpus import PROMPT_WEIGHT, Chat, Encoder
from specbench_cli.training.packing import Encoded, Packed

AT_ONCE = 64
MAX_ANSWER = 128


def sample_replies(
    target: LlamaForCausalLM,
    encode: Encoder,
    chats: Sequence[Chat],
    file: Path,
    seed: int,
    progress: Callable[[int], None] = lambda _: None,
    greedy: bool = False,
) -> list[list[int]]:
    """The target's answer to each chat's first question; those that `file` holds are kept.

    Args:
        target: in evaluation mode.
        progress: told how many answers there are, after each batch.
        greedy: the likeliest token each time; nothing is drawn.

    Returns:
        Token ids of each answer, ending by the EOS where that came within `MAX_ANSWER` tokens.
    """
    prompts = [encode.prompt(chat[0][0]) for chat in chats]
    # Neighbours of one length need little padding.
    order = sorted(range(len(prompts)), key=lambda index: (len(prompts[index]), index))
    batches = [order[first : first + AT_ONCE] for first in range(0, len(order), AT_ONCE)]
    done = _read(file)
    with file.open("a", encoding="utf-8") as log:
        for number, batch in enumerate(batches):
            if not any(index not in done for index in batch):
                continue
            torch.manual_seed(seed * len(batches) + number)
            for index, ids in zip(
                batch, _answers(target, encode, [prompts[i] for i in batch], greedy), strict=True
            ):
                done[index] = ids
                log.write(json.dumps({"chat": index, "answer": ids}) + "\n")
            log.flush()
            progress(len(done))
    return [done[index] for index in range(len(prompts))]


def replied(encode: Encoder, chats: Sequence[Chat], answers: Sequence[list[int]]) -> list[Encoded]:
    """First questions with the answers given, for a model with the target's tokenizer."""
    prompts = [encode.prompt(chat[0][0]) for chat in chats]
    return [
        Encoded([*prompt, *answer], [PROMPT_WEIGHT] * len(prompt) + [1.0] * len(answer))
        for prompt, answer in zip(prompts, answers, strict=True)
    ]


class Replies(Packed):
    """Replies over and over, in a fixed order; made when the first one is needed."""

    def __init__(self, padding: int, make: Callable[[], Sequence[Encoded]]) -> None:
        super().__init__(padding)
        self._make = make
        self._replies: Sequence[Encoded] | None = None
        self._drawn = 0

    def draw(self) -> Encoded:
        """The next reply."""
        if self._replies is None:
            self._replies = self._make()
        self._drawn += 1
        return self._replies[(self._drawn - 1) % len(self._replies)]

    def place(self) -> dict[str, Any]:
        """How many were drawn."""
        return {"drawn": self._drawn}

    def go_to(self, place: dict[str, Any]) -> None:
        """Continue after as many."""
        self._drawn = place["drawn"]


@torch.no_grad()
def _answers(
    target: LlamaForCausalLM, encode: Encoder, prompts: Sequence[Sequence[int]], greedy: bool
) -> Iterator[list[int]]:
    """One answer a prompt, cut after its EOS."""
    pad, end = encode.padding, encode.end
    longest = max(map(len, prompts))
    ids = torch.tensor([[pad] * (longest - len(p)) + list(p) for p in prompts])
    model: Any = target  # transformers' generation mixin does not type its own classes
    with torch.autocast(target.device.type, torch.bfloat16):
        answered = model.generate(
            ids.to(target.device),
            attention_mask=ids.ne(pad).long().to(target.device),
            **({"do_sample": False} if greedy else {"do_sample": True, "top_k": 0}),
            max_new_tokens=MAX_ANSWER,
        )
    for answer in answered[:, longest:].tolist():
        yield answer[: answer.index(end) + 1] if end in answer else answer


def _read(file: Path) -> dict[int, list[int]]:
    """The whole lines of the file; a half-written last one is cut off."""
    if not file.is_file():
        return {}
    text = file.read_text(encoding="utf-8")
    whole = text[: text.rfind("\n") + 1]
    file.write_text(whole, encoding="utf-8")
    rows = [json.loads(line) for line in whole.splitlines()]
    return {row["chat"]: row["answer"] for row in rows}

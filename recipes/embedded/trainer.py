"""Training the embedded family: `embedded-7m`, its draft `embedded-1m`, and two variants.

The target learns by cross-entropy. The draft does too at first, then follows the target's own
distribution (KL divergence), much of it on the target's own replies, because what it is for is to
agree with the target (DistillSpec, Zhou et al., ICLR 2024, arXiv:2310.08461). `embedded-exit` is
the target fine-tuned so that its earlier layers can speak too; `embedded-xv` is a draft with a
vocabulary of its own, which can follow the target through text only.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path

import torch
from transformers import LlamaForCausalLM, PreTrainedTokenizerFast

from recipes.embedded.early_exit import exit_loss
from recipes.embedded.family import HARD, Recipe, build, export
from recipes.embedded.tokenizer import tokenizer_texts, train_tokenizer
from specbench_cli import files
from specbench_cli.engine.models.checkpoint import disable_progress_bars, read_tokenizer
from specbench_cli.engine.models.load import load_decoder
from specbench_cli.training import loop
from specbench_cli.training.corpus import Chat, Corpus, Encoder, choose_reply_chats
from specbench_cli.training.loop import WORK, Report
from specbench_cli.training.losses import Loss, compile_loss, load_model, target_loss, text_loss
from specbench_cli.training.packing import EncodedChat
from specbench_cli.training.replies import Replies, make_prompts, sample_replies

N_REPLIES = 3000
FOREIGN_SEED, OPEN_SEED, HARD_SEED = 1000, 2000, 3000
"""Added to the seed for the texts of the second tokenizer, and for the rows of the second cycle."""


@dataclass(frozen=True)
class Trainer:
    """What all recipes share.

    Args:
        out: folder for the models; it may hold some of the work already.
        gsm8k: the problems in the corpus; empty = generated text alone.
        n_replies: questions that the target answers for its drafts.
        fast: use torch.compile where this machine can.
        report: called after every step with the model's name.
    """

    out: Path
    gsm8k: Sequence[Chat]
    seed: int
    device: torch.device
    n_replies: int = N_REPLIES
    fast: bool = True
    report: Report = lambda _name, _point: None

    def train_pair(
        self, base: Recipe, target: Recipe, draft: Recipe
    ) -> dict[str, loop.TrainingResult]:
        """The target in two cycles, then its draft; each loss curve and its seconds, by name."""
        tokenizer = self._tokenizer("tokenizer", self.seed, target.vocabulary)
        results = {base.name: self._train(base, tokenizer)}
        results[target.name] = self._train(target, tokenizer, start=self.out / base.name)
        results[draft.name] = self._train(draft, tokenizer, self.out / target.name)
        return results

    def train_early_exit(self, recipe: Recipe, target: Path) -> dict[str, loop.TrainingResult]:
        """The early-exit variant of the stored `target`."""
        tokenizer: PreTrainedTokenizerFast = read_tokenizer(target)
        return {recipe.name: self._train(recipe, tokenizer, start=target)}

    def train_foreign(self, recipe: Recipe, target: Path) -> dict[str, loop.TrainingResult]:
        """A draft of the stored `target` with a vocabulary of its own."""
        name = f"tokenizer-{recipe.name}"
        tokenizer = self._tokenizer(name, self.seed + FOREIGN_SEED, recipe.vocabulary)
        return {recipe.name: self._train(recipe, tokenizer, target)}

    def _train(
        self,
        recipe: Recipe,
        tokenizer: PreTrainedTokenizerFast,
        target: Path | None = None,
        start: Path | None = None,
    ) -> loop.TrainingResult:
        """Train one model towards text or the stored `target`, from `start` or from nothing."""
        model = build(recipe, self.seed, self.device)
        if start is not None:
            model.load_state_dict(load_model(start, self.device).state_dict())
        result = loop.train(
            model,
            self._stages(recipe, model, Encoder(tokenizer), target),
            recipe.optimization,
            self.out / WORK / recipe.name,
            progress=partial(self.report, recipe.name),
        )
        export(model, tokenizer, self.out / recipe.name)
        return result

    def _stages(
        self, recipe: Recipe, model: LlamaForCausalLM, encode: Encoder, target: Path | None
    ) -> list[loop.TrainingStage]:
        sources: dict[str, loop.BatchSource] = {
            "corpus": Corpus(encode, self.gsm8k, self.seed),
            "open": Corpus(encode, self.gsm8k, self.seed + OPEN_SEED, HARD, "open"),
            "hard": Corpus(encode, self.gsm8k, self.seed + HARD_SEED, HARD),
        }
        losses: dict[str, Loss] = {}
        for towards in {stage.objective for stage in recipe.stages}:
            if towards == "exits":
                losses[towards] = exit_loss(model, self.fast)
                continue
            if towards == "target" and target is not None:
                loss = target_loss(model, load_model(target, self.device))
            else:
                loss = text_loss(model)
            losses[towards] = compile_loss(loss) if self.fast else loss
        if target is not None:
            sources["replies"] = Replies(encode.padding, partial(self._replies, encode, target))
        return [
            each.make_stage(losses[each.objective], sources[each.data]) for each in recipe.stages
        ]

    def _replies(self, encode: Encoder, target: Path) -> list[EncodedChat]:
        """The target's replies to questions like those of training, for a draft's `encode`."""
        chats = choose_reply_chats(self.gsm8k, self.seed + 1, self.n_replies)
        tokenizer: PreTrainedTokenizerFast = read_tokenizer(target)
        own = Encoder(tokenizer)
        file = self.out / WORK / "replies.jsonl"
        model = partial(load_decoder, target, name="target", device=self.device)
        found = sample_replies(model, make_prompts(own, chats), own.ends, file, self.seed)
        if encode.vocabulary == own.vocabulary:
            return [reply.encode() for reply in found.values()]
        whole = {at: reply.answer for at, reply in found.items() if reply.answer[-1] == own.end}
        texts = tokenizer.batch_decode(list(whole.values()), skip_special_tokens=True)
        return [encode([(chats[at][0][0], text)]) for at, text in zip(whole, texts, strict=True)]

    def _tokenizer(self, name: str, seed: int, size: int) -> PreTrainedTokenizerFast:
        """The tokenizer kept in the work folder, trained first where there is none."""
        folder = self.out / WORK / name
        files.check_no_link(folder)
        if not (folder / "tokenizer.json").is_file():
            trained = train_tokenizer(tokenizer_texts(self.gsm8k, seed), size)
            disable_progress_bars()
            with files.staging_folder(folder, overwrite=None) as staging:
                trained.save_pretrained(staging, save_jinja_files=False)
        tokenizer: PreTrainedTokenizerFast = PreTrainedTokenizerFast.from_pretrained(folder)
        return tokenizer

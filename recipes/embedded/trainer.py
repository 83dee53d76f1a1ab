"""Training of the embedded models: `embedded-7m`, its draft `embedded-1m`, and two variants.

The target is trained with cross-entropy on text. The draft is first trained in the same way. Then
it is trained to match the target's distribution (KL divergence), mostly on replies that the target
generated, as in DistillSpec (Zhou et al., ICLR 2024, arXiv:2310.08461). `embedded-exit` is the
target, fine-tuned so that its earlier layers can predict tokens too. `embedded-xv` is a draft with
another vocabulary. Its token ids differ from the target's, so it learns from the text of the
target's replies.
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
"""Offsets of the random seed: for the texts of the second tokenizer, and for the two stages of the
target's second training cycle."""


@dataclass(frozen=True)
class Trainer:
    """Trainer of the embedded models.

    Args:
        out: folder for the models. Finished work in it is not repeated.
        gsm8k: problems of GSM8K for the corpus. Empty: the corpus has generated text only.
        n_replies: number of questions that the target answers to train its drafts.
        fast: use torch.compile if it works on this machine.
        report: function that is called after every step with the model's name and the progress.
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
        """Train the target in two cycles, then its draft. Return the training results by model
        name.
        """
        tokenizer = self._load_tokenizer("tokenizer", self.seed, target.vocabulary)
        results = {base.name: self._train(base, tokenizer)}
        results[target.name] = self._train(target, tokenizer, start=self.out / base.name)
        results[draft.name] = self._train(draft, tokenizer, self.out / target.name)
        return results

    def train_early_exit(self, recipe: Recipe, target: Path) -> dict[str, loop.TrainingResult]:
        """Fine-tune a target so that its earlier layers can predict tokens too.

        Args:
            target: folder of the target.
        """
        tokenizer: PreTrainedTokenizerFast = read_tokenizer(target)
        return {recipe.name: self._train(recipe, tokenizer, start=target)}

    def train_foreign(self, recipe: Recipe, target: Path) -> dict[str, loop.TrainingResult]:
        """Train a draft model that has another vocabulary than its target.

        Args:
            target: folder of the target.
        """
        name = f"tokenizer-{recipe.name}"
        tokenizer = self._load_tokenizer(name, self.seed + FOREIGN_SEED, recipe.vocabulary)
        return {recipe.name: self._train(recipe, tokenizer, target)}

    def _train(
        self,
        recipe: Recipe,
        tokenizer: PreTrainedTokenizerFast,
        target: Path | None = None,
        start: Path | None = None,
    ) -> loop.TrainingResult:
        """Train one model and write it to a folder.

        Args:
            target: folder of the model whose distribution is learned. None: learn from text.
            start: folder of the model whose weights are the start. None: start from random weights.
        """
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
            sources["replies"] = Replies(
                encode.padding, partial(self._sample_replies, encode, target)
            )
        return [
            each.make_stage(losses[each.objective], sources[each.data]) for each in recipe.stages
        ]

    def _sample_replies(self, encode: Encoder, target: Path) -> list[EncodedChat]:
        """Return the target's replies to training questions, encoded for a draft.

        Args:
            encode: encoder with the draft's tokenizer.
            target: folder of the target.
        """
        chats = choose_reply_chats(self.gsm8k, self.seed + 1, self.n_replies)
        tokenizer: PreTrainedTokenizerFast = read_tokenizer(target)
        target_encoder = Encoder(tokenizer)
        file = self.out / WORK / "replies.jsonl"
        model = partial(load_decoder, target, name="target", device=self.device)
        found = sample_replies(
            model, make_prompts(target_encoder, chats), target_encoder.ends, file, self.seed
        )
        if encode.vocabulary == target_encoder.vocabulary:
            return [reply.encode() for reply in found.values()]
        complete_replies = {
            at: reply.answer
            for at, reply in found.items()
            if reply.answer[-1] == target_encoder.end
        }
        texts = tokenizer.batch_decode(list(complete_replies.values()), skip_special_tokens=True)
        return [
            encode([(chats[at][0][0], text)])
            for at, text in zip(complete_replies, texts, strict=True)
        ]

    def _load_tokenizer(self, name: str, seed: int, size: int) -> PreTrainedTokenizerFast:
        """Load a tokenizer from the work folder. If there is none, train it first."""
        folder = self.out / WORK / name
        files.check_no_link(folder)
        if not (folder / "tokenizer.json").is_file():
            trained = train_tokenizer(tokenizer_texts(self.gsm8k, seed), size)
            disable_progress_bars()
            with files.staging_folder(folder, overwrite=None) as staging:
                trained.save_pretrained(staging, save_jinja_files=False)
        tokenizer: PreTrainedTokenizerFast = PreTrainedTokenizerFast.from_pretrained(folder)
        return tokenizer

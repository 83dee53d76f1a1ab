"""Training of draft models from random weights, on text."""

import json
from typing import Any

from specbench_cli.training.align import RECORD, Aligner, AlignEstimate
from specbench_cli.training.heads.mat import EstimateLog
from specbench_cli.training.loop import WORK, claim


class ScratchTrainer(Aligner):
    """Trainer of drafts with any number of layers, from random weights, on the training corpus."""

    def train_draft(self, name: str, layers: int, updates: int, seed: int) -> dict[str, Any]:
        """Train a draft from random weights and write it to a folder. Skip a draft that is
        finished.

        Args:
            name: name of the draft's folder.
            layers: number of layers. The rest of the shape is that of the model `draft`.
            updates: number of training updates.
            seed: random seed of the weights and of the training texts.

        Returns:
            The content of the draft's `alignment.json`.

        Raises:
            UsageError: the training options are invalid, or the target is not an embedded model,
                for
                which alone there is a corpus.
        """
        claim(self.out / WORK, {"target_sha256": self._target_sha256})
        record = self.out / name / RECORD
        if not record.is_file():
            config = self._make_initial_model().config
            config.num_hidden_layers = layers
            folder = self.out / WORK / name
            model, result = self._train_on_corpus(config, updates, seed, folder)
            facts = {"loss": "ce", "samples": "text", "start": "random weights", "seed": str(seed)}
            last = result.curve[-1]
            self._export(
                model, name, facts, EstimateLog(folder, AlignEstimate), last.step, last.tokens
            )
        found: dict[str, Any] = json.loads(record.read_text(encoding="utf-8"))
        return found

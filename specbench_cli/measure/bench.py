"""The test bench: tokenizer, decoders and states of a run, loaded once."""

from __future__ import annotations

import sys
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict
from functools import cache, partial
from json import JSONDecodeError
from pathlib import Path
from struct import error as StructError
from time import monotonic
from typing import Any, TypeVar

import psutil
import torch
from safetensors import SafetensorError

from specbench_cli.engine.drafting.vocabulary import Translation, Vocabulary
from specbench_cli.engine.imposed import impose
from specbench_cli.engine.method import Method
from specbench_cli.engine.models.artifact import Trained
from specbench_cli.engine.models.checkpoint import (
    ConfigFacts,
    Weights,
    config_facts,
    read_tokenizer,
)
from specbench_cli.engine.models.cuda.graphs import CudaGraphs
from specbench_cli.engine.models.decoder import Decoder
from specbench_cli.engine.models.fused import FusedStack
from specbench_cli.engine.models.head import FeatureHead
from specbench_cli.engine.models.load import load_decoder, module_of
from specbench_cli.engine.request import Request
from specbench_cli.engine.sequence import StopRule
from specbench_cli.engine.verify.processor import Processor
from specbench_cli.engine.workspace import Workspace
from specbench_cli.errors import EnvironmentFault, PromptError, SpecbenchError, UsageError
from specbench_cli.measure.energy import Energy
from specbench_cli.measure.memory import peak_bytes, reset_peak
from specbench_cli.measure.placement import check_threads, choose_device, placement
from specbench_cli.models.heads import HeadFiles, resolve_head
from specbench_cli.models.resolve import Checkpoint
from specbench_cli.plan.plan import Plan
from specbench_cli.store.run_dir import Prompt
from specbench_cli.tasks import Question, build_messages, decode_answer, render_prompt

_Read = TypeVar("_Read")

CHECK_S = 10.0
"""Time in seconds after which the check of first turns stops at the next question that fails."""
NAMED = 5
"""Maximum number of further questions that an error names."""
_LEAVE_OUT = "leave the question out (--category, --limit, or a .jsonl file of your own)"
_LETTERS = 16
"""Characters per context position of the text prefix that is tokenized first."""

_SURELY = 2
"""Multiple of the context. If a prefix has more tokens, the whole text is too long, even if the cut
split a token."""


class Bench:
    """What decoding needs, for all cells of a run.

    Attributes:
        workspace: decoders and states.
        tokenizer: transformers' own, of the target.
        module: builds transformers' own module of a role.
        facts: by role, what is known of each checkpoint.
        device: where everything runs. energy: what counts the joules there.
        peaks: most bytes held at once while loading, and while warming up; of single outputs the
            records say it.
        unfit: the rows whose trained modules do not load, with why.
        processor: what holds the target to the run's grammar, if it has one.

    Args:
        plan: of the run.
        lenient: whether there may be such rows; else their fault is raised.
    """

    def __init__(self, plan: Plan, *, lenient: bool = False) -> None:
        config = plan.config
        self._plan = plan
        self.device = choose_device(config.home)
        self._graphs = self._records_graphs()
        self.energy = Energy.of(self.device)
        self.peaks: dict[str, int] = {}
        reset_peak(self.device)
        self.placement = placement(plan, self.device) if plan.parallel else None
        check_threads(config.threads)
        if config.threads:
            torch.set_num_threads(config.threads)
        checkpoints = plan.checkpoints
        self.facts: dict[str, ConfigFacts] = {
            role: readable(config_facts, checkpoint) for role, checkpoint in checkpoints.items()
        }
        self.tokenizer = tokenizer_of(plan.target)
        self.processor = self._held()
        words = {role: self._words(role, each) for role, each in checkpoints.items()}
        dtype: torch.dtype = getattr(torch, config.dtype)
        for device, roles in self._roles().items():
            check_memory([(checkpoints[r].label, self.facts[r]) for r in roles], dtype, device)
        ids = min(facts.vocab_size for facts in self.facts.values())
        imposed = None if config.acceptance is None else (config.acceptance, ids)
        load = partial(loaded, dtype=dtype, imposed=imposed, graphs=self._graphs)
        decoders = self._load_decoders(load, words)
        self.context = min(decoder.max_positions for decoder in decoders.values())
        # Building a module takes a second or more: peers and near-ties need it, others do not.
        self.module = cache(
            lambda role: readable(lambda _: module_of(decoders[role]), checkpoints[role])
        )
        self._heads: dict[Trained, HeadFiles] = {}
        self.workspace = Workspace(decoders, 0, self.module, self.tokenizer, self._make)
        self.workspace.synthetic = plan.synthetic
        if self.placement is not None:
            self.workspace.transport = self.placement.transport
        if self._beside:
            self.workspace.decoder_factories = {
                "draft": partial(
                    load,
                    checkpoints["draft"].path,
                    name="draft",
                    device=self._beside,
                    input_vocab_size=self.facts["target"].vocab_size,
                )
            }
        self.unfit = self._load_artifacts(lenient)
        self.peak("loading")

    def _records_graphs(self) -> bool:
        """Return True if forwards are recorded as CUDA graphs.

        Raises:
            EnvironmentFault: the run requires CUDA graphs, but the device is not a CUDA device.
        """
        config, on_gpu = self._plan.config, self.device.type == "cuda"
        if config.graphs == "on" and not on_gpu:
            raise EnvironmentFault(
                f"--graphs on: what is recorded is CUDA graphs, and this run is on {self.device}",
                hint="--device cuda, or leave --graphs out",
            )
        return config.graphs != "off" and on_gpu

    def _load_decoders(
        self, load: Callable[..., Decoder], words: Mapping[str, Translation | None]
    ) -> dict[str, Decoder]:
        """Load the decoder of each role.

        Args:
            load: function that loads one decoder; see `loaded`.
            words: translation of each role's vocabulary.
        """
        plan, checkpoints = self._plan, self._plan.checkpoints
        decoders = {
            role: readable(
                partial(
                    load,
                    name=role if role in ("target", "draft") else checkpoint.label,
                    device=self.device,
                ),
                checkpoint,
            )
            for role, checkpoint in checkpoints.items()
        }
        for role, decoder in decoders.items():
            decoder.translation = words[role]
        _encoding(decoders, checkpoints)
        if plan.config.contrast is not None and decoders["target"].parted(())[1] is not None:
            raise UsageError(
                f"--contrast weakens the text that a target reads, and {plan.target.label} reads"
                " its prompts beside it",
                hint="choose a --target that reads text alone, or drop --contrast",
            )
        return decoders

    def _load_artifacts(self, lenient: bool) -> dict[str, SpecbenchError]:
        """Load the trained modules of the methods before any timing. Return the errors by method.

        Args:
            lenient: see `Bench`.
        """
        unfit: dict[str, SpecbenchError] = {}
        for method_run in self._plan.method_runs:
            if method_run.label not in self._plan.apart:
                try:
                    for wanted in method_run.method.artifacts():
                        self.workspace.artifact(wanted)
                except (UsageError, EnvironmentFault) as fault:
                    if not lenient:
                        raise
                    unfit[method_run.label] = fault
        return unfit

    def _held(self) -> Processor | None:
        grammar = self._plan.grammar
        if grammar is None:
            return None
        target = self.facts["target"]
        ends = [token for token in target.eos if token < target.vocab_size]
        return grammar.processor(self.tokenizer, ends, self._plan.target.label)

    @property
    def _beside(self) -> torch.device | None:
        """Where a worker holds a draft of its own, if one does."""
        placed = self.placement
        return placed.device if placed is not None and placed.apart else None

    def _roles(self) -> dict[torch.device, list[str]]:
        """The models that each device holds, once for each time that it holds them."""
        held = {self.device: list(self._plan.checkpoints)}
        if self._beside is not None:
            held.setdefault(self._beside, []).append("draft")
        return held

    def _words(self, role: str, draft: Checkpoint) -> Translation | None:
        """The translation for a draft with another vocabulary than the target's.

        Raises:
            UsageError: who asks for it does not take any.
        """
        if role == "target":
            return None
        target, theirs = self._plan.target, tokenizer_of(draft)
        differing = _differing(self.tokenizer, theirs, self.facts[role].vocab_size)
        if not differing:
            return None
        asking = [
            method_run.method
            for method_run in self._plan.method_runs
            if role in _roles_of(method_run.method)
        ]
        if role != "draft" or not all(method.any_vocabulary for method in asking):
            names = sorted({m.name for m in asking if not m.any_vocabulary})
            raise UsageError(
                f"{draft.label} cannot draft for {target.label}"
                f"{' with ' + ', '.join(names) if names else ''}: their vocabularies differ"
                f" ({differing} of {len(self.tokenizer)} tokens have another id or none)",
                hint="choose a --draft with the target's tokenizer (specbench list models), methods"
                " that draft in any vocabulary (-m tli,uag,omnidraft), or methods that need no"
                " draft (specbench list methods)",
            )
        try:
            ours, own = Vocabulary.from_tokenizer(self.tokenizer), Vocabulary.from_tokenizer(theirs)
        except ValueError as error:
            raise UsageError(
                f"{draft.label} cannot draft for {target.label}: a tokenizer cannot be read as"
                f" bytes, {error}",
                hint="choose a --draft with the target's tokenizer (specbench list models)",
            ) from error
        sizes = [self.facts[each].vocab_size for each in ("target", role)]
        return Translation(ours.with_size(sizes[0]), own.with_size(sizes[1]), self.device)

    def _make(self, wanted: Trained) -> Any:
        """The trained module that a method asks for."""
        kind = wanted.kind
        target = self._plan.target
        files = resolve_head(
            wanted.source, kind.kind, target, in_target=kind.inside, hint=kind.hint
        )
        made = readable(lambda path: kind.load(path, self.workspace.decoders), files)
        if self._graphs:
            recorded(made)
        self._heads[wanted] = files
        return made

    def prompt(self, question: Question, answers: Sequence[Sequence[int]] = ()) -> list[int]:
        """Return the token ids of a prompt: the turns so far, with the answers in between.

        Raises:
            PromptError: the target cannot decode the prompt. The error names the question.
        """
        label, turn = self._plan.target.label, len(answers) + 1
        name = question.prompt_id if turn == 1 else f"{question.prompt_id}, turn {turn}"
        for text in question.turns[:turn]:
            self._check_text(name, text)
        try:
            texts = [decode_answer(self.tokenizer, ids) for ids in answers]
            messages = build_messages(question.turns, texts, question.before)
            ids = render_prompt(self.tokenizer, messages, raw=self._plan.config.raw, label=label)
        except PromptError as fault:
            raise PromptError(f"prompt {name}: {fault.message}", fault.hint) from fault
        if not ids:
            raise PromptError(
                f"prompt {name} has no token: the tokenizer of {label} drops all of its text",
                hint=_LEAVE_OUT,
            )
        width = self.facts["target"].vocab_size
        if (largest := max(ids)) >= width:
            raise PromptError(
                f"prompt {name} has the token {largest}, and {label} has {width} tokens, 0 to"
                f" {width - 1}: its tokenizer does not fit its weights",
                hint="compare added_tokens in its tokenizer.json with vocab_size in its"
                f" config.json, or {_LEAVE_OUT}",
            )
        return ids

    def stop(self, budget: int) -> StopRule:
        """The one stop rule with a budget."""
        return StopRule(eos=self.facts["target"].eos, max_new_tokens=budget)

    def request(
        self, prompt_id: str, turn: int, ids: Sequence[int], stop: StopRule, topic: str = ""
    ) -> Request:
        """A prompt as the target reads it."""
        return Request.of(self.workspace.decoders["target"], prompt_id, turn, ids, stop, topic)

    def request_for(self, prompt: Prompt, budget: int) -> Request:
        """Return the request of a prompt, with room for it and its output."""
        self.workspace.reserve(len(prompt.ids) + budget)
        at = prompt.prompt_id, prompt.turn, prompt.ids
        return self.request(*at, self.stop(budget), prompt.category)

    def check_first_turns(self) -> None:
        """Raise PromptError if the target cannot decode the first turn of a question.

        This check runs before the measurement.

        Later turns contain answers, so `Prompts.prompt` checks them when they are decoded.
        """
        faults: dict[str, PromptError] = {}
        began = monotonic()
        for question in self._plan.questions:
            try:
                ids = self.prompt(question)
                self.check_fits(question.prompt_id, len(ids), self._plan.budget(question))
            except PromptError as fault:
                faults[question.prompt_id] = fault
                if monotonic() - began > CHECK_S:  # a template that is slow on every question
                    break
        if faults:
            first, *others = faults
            more = ""
            if others:
                named = ", ".join(others[:NAMED]) + (", ..." if len(others) > NAMED else "")
                more = f" (and {len(others)} more cannot be asked: {named})"
            raise PromptError(faults[first].message + more, faults[first].hint)

    def _check_text(self, name: str, text: str) -> None:
        """Raise PromptError if a prefix of the text already has more tokens than the context.

        Tokenizing a whole text of 50 MB would take minutes and gigabytes.
        """
        most, end = _SURELY * self.context, _LETTERS * self.context
        while end < len(text):
            tokens = len(self.tokenizer(text[:end], add_special_tokens=False).input_ids)
            if tokens > most:
                raise self._too_long(f"prompt {name} has more than {tokens} tokens; that is")
            end *= 4

    def check_fits(self, name: str, prompt: int, budget: int) -> None:
        """Raise PromptError if a prompt and its budget are longer than the models' context."""
        if prompt + budget > self.context:
            raise self._too_long(
                f"prompt {name} has {prompt} tokens; with {budget} new ones that is"
            )

    def _too_long(self, what: str) -> PromptError:
        """Return the error for a prompt that is longer than the context of the models."""
        models = " and ".join(each.label for each in self._plan.checkpoints.values())
        why = [
            f" ({self._plan.checkpoints[role].label}: {decoder.limit})"
            for role, decoder in self.workspace.decoders.items()
            if decoder.max_positions == self.context and decoder.limit
        ]
        return PromptError(
            f"{what} more than the {self.context} positions of {models}{''.join(why[:1])}",
            hint="lower --max-new-tokens, leave the question out (--category, --limit, or a"
            " .jsonl file of your own), or choose models with a longer context",
        )

    def resolved(self) -> dict[str, Any]:
        """The values of the configuration that only the machine could tell."""
        return {
            "threads": torch.get_num_threads(),
            "device": str(self.device),
            "graphs": "on" if self._graphs else "off",
        }

    @property
    def devices(self) -> dict[str, str] | None:
        """Where the workers of methods that have some compute, as --devices has it."""
        return None if self.placement is None else dict(self.placement.words)

    def peak(self, phase: str) -> None:
        """Keep the peak of a phase that ends here; the next one begins."""
        self.peaks[phase] = max(self.peaks.get(phase, 0), peak_bytes(self.device))
        reset_peak(self.device)

    def memory(self) -> dict[str, Any]:
        """What the manifest keeps of memory: bytes of weights, those of the draft that a worker
        holds once more (`again`) among them, and of states, the worker's left out; and `peaks`."""
        draft = self.workspace.decoders["draft"].weight_bytes if self._beside is not None else 0
        return {
            "weight_bytes": self.workspace.weight_bytes + draft,
            "state_bytes": self.workspace.state_bytes,
            "again": {"draft": draft} if draft else {},
            "peaks": dict(self.peaks),
        }

    def close(self) -> None:
        """End the workers."""
        self.workspace.close()

    def models(self) -> dict[str, Mapping[str, Any]]:
        """What the manifest keeps of each model."""
        checkpoints = self._plan.checkpoints
        return {
            self.workspace.decoders[role].name: {
                "label": checkpoints[role].label,
                **{name: value for name, value in asdict(facts).items() if name != "eos"},
                "eos": sorted(facts.eos),
                "weight_bytes": self.workspace.decoders[role].weight_bytes,
                "engine": type(self.workspace.decoders[role]).__name__,
            }
            for role, facts in self.facts.items()
        }

    def drafting_heads(self) -> dict[str, Mapping[str, Any]]:
        """What tells each head from others, by its name in traces."""
        return {
            head.name: {
                "label": files.label,
                "sha256": Weights(files.path).sha256(),
                "n_layers": head.n_layers,
                "engine": type(head).__name__,
            }
            for wanted, files in self._heads.items()
            if isinstance(head := self.workspace.artifact(wanted), Decoder | FeatureHead)
        }

    def heads(self) -> dict[str, Mapping[str, Any]]:
        """What the manifest keeps of each trained module."""
        return {
            f"{wanted.kind.kind} {files.label}": {
                "sha256": Weights(files.path).sha256(),
                "weight_bytes": self.workspace.artifact(wanted).weight_bytes,
            }
            for wanted, files in self._heads.items()
        }


def loaded(
    path: Path,
    *,
    name: str,
    device: torch.device,
    dtype: torch.dtype,
    imposed: tuple[float, int] | None,
    graphs: bool = False,
    input_vocab_size: int = 0,
) -> Decoder:
    """A decoder of a checkpoint.

    Args:
        input_vocab_size: See `Decoder`.
        imposed: the acceptance and the ids that it is to say.
        graphs: whether its forwards are replayed from CUDA graphs where they can be.
    """
    decoder = load_decoder(path, name=name, device=device, dtype=dtype)
    decoder.input_vocab_size = input_vocab_size
    if graphs:
        recorded(decoder)
    return decoder if imposed is None else impose(decoder, *imposed)


def recorded(model: Any) -> None:
    """Have a model's forwards recorded as CUDA graphs, if it is one of fused layers."""
    if isinstance(model, FusedStack):
        model.record(CudaGraphs(model.device))


def tokenizer_of(checkpoint: Checkpoint) -> Any:
    """Load the transformers tokenizer; add the default chat template if it has none.

    Raises:
        EnvironmentFault: its files are missing or damaged.
    """
    tokenizer = read_tokenizer(checkpoint.path, checkpoint.label)
    if checkpoint.template and not tokenizer.chat_template:
        tokenizer.chat_template = checkpoint.template
    tokenizer.model_max_length = sys.maxsize  # what is too long, `check_fits` says
    return tokenizer


def readable(read: Callable[[Path], _Read], checkpoint: Checkpoint | HeadFiles) -> _Read:
    """What `read` makes of a checkpoint's folder, which may say anything of itself.

    Raises:
        EnvironmentFault: its files are cut, or its config describes no model, or another one.
    """
    try:
        return read(checkpoint.path)
    except (SafetensorError, StructError, JSONDecodeError, OSError) as error:
        says = str(error).strip().partition("\n")[0]
        raise EnvironmentFault(
            f"the files of {checkpoint.label} are damaged or cut off: {says}",
            hint=f"delete {checkpoint.path} and fetch it once more",
        ) from error
    except SpecbenchError:
        raise
    except Exception as error:  # whatever a wrong config makes transformers and torch raise
        says = str(error).strip().partition("\n")[0] or type(error).__name__
        raise EnvironmentFault(
            f"no model can be made of the files of {checkpoint.label}: {says}",
            hint="compare its config.json with the one of who published it; --traceback says more",
        ) from error


def check_memory(
    held: Sequence[tuple[str, ConfigFacts]],
    dtype: torch.dtype,
    device: torch.device,
) -> None:
    """Raise EnvironmentFault if the weights alone do not fit in the device's free memory."""
    numbers = sum(facts.parameters for _, facts in held)
    needed = numbers * dtype.itemsize
    free = (
        torch.cuda.mem_get_info(device)[0]
        if device.type == "cuda"
        else psutil.virtual_memory().available
    )
    if needed > free:
        names = " and ".join(label for label, _ in held)
        lean = f"--dtype bfloat16 ({numbers * 2 / 1e9:.3g} GB), " if dtype.itemsize > 2 else ""
        raise EnvironmentFault(
            f"{names}: {needed / 1e9:.3g} GB ({needed:,} bytes) of weights in"
            f" {str(dtype).removeprefix('torch.')}, and {device} has {free / 1e9:.3g} GB"
            f" ({free:,}) free",
            hint=f"{lean}a smaller --target, or another --device",
        )


def _encoding(decoders: Mapping[str, Decoder], checkpoints: Mapping[str, Checkpoint]) -> None:
    """Raise UsageError if a draft has an encoder and the target gives it nothing to read."""

    def encodes(decoder: Decoder) -> bool:
        _, source = decoder.parted(())
        return source is not None

    if encodes(decoders["target"]):
        return
    for role, decoder in decoders.items():
        if encodes(decoder):
            raise UsageError(
                f"{checkpoints[role].label} cannot draft for {checkpoints['target'].label}: it"
                " reads its prompt through an encoder, and the target has none",
                hint="choose a --draft without an encoder, or a --target with one",
            )


def _roles_of(method: Method) -> set[str]:
    """The models beside the target that a method drafts with, by role."""
    return {*method.models(), *(("draft",) if "draft" in method.needed else ())}


def _differing(ours: Any, theirs: Any, width: int) -> int:
    """How many ids of the target's tokenizer a draft does not read as the same token.

    Vocabularies may be padded differently, and the draft's may go on where the target's ends.

    Args:
        width: ids that the draft has an embedding for.
    """
    at = {index: token for token, index in theirs.get_vocab().items()}
    return sum(
        index >= width or at.get(index, token) != token for token, index in ours.get_vocab().items()
    )

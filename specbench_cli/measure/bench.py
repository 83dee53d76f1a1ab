"""Test bench of a run: the loaded models, the tokenizer and the model states.

Each repeat of the run loads one test bench. All methods decode with it.
"""

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
from specbench_cli.engine.imposed_acceptance import impose_acceptance
from specbench_cli.engine.method import Method
from specbench_cli.engine.models.artifact import ArtifactSpec
from specbench_cli.engine.models.checkpoint import (
    CheckpointFacts,
    Weights,
    read_checkpoint_facts,
    read_tokenizer,
)
from specbench_cli.engine.models.cuda.graphs import CudaGraphs
from specbench_cli.engine.models.decoder import Decoder
from specbench_cli.engine.models.fused import FusedStack
from specbench_cli.engine.models.head import FeatureHead
from specbench_cli.engine.models.load import get_module, load_decoder
from specbench_cli.engine.request import Request
from specbench_cli.engine.sequence import StopRule
from specbench_cli.engine.verify.processor import LogitsProcessor
from specbench_cli.engine.workspace import Workspace
from specbench_cli.errors import EnvironmentFault, PromptError, SpecbenchError, UsageError
from specbench_cli.measure.energy import EnergyMeter
from specbench_cli.measure.memory import peak_bytes, reset_peak
from specbench_cli.measure.placement import check_threads, choose_device, make_placement
from specbench_cli.models.heads import HeadFiles, resolve_head
from specbench_cli.models.resolve import Checkpoint
from specbench_cli.plan.plan import Plan
from specbench_cli.store.run_dir import Prompt
from specbench_cli.tasks import Question, build_messages, decode_answer, render_prompt

_T = TypeVar("_T")

CHECK_TIME_S = 10.0
"""Seconds after which `Bench.check_first_turns` stops at the next question that fails."""
MAX_LISTED = 5
"""Maximum number of further failed questions that an error message lists."""
_LEAVE_OUT = "leave the question out (--category, --limit, or a .jsonl file of your own)"
_CHARACTERS_PER_POSITION = 16
"""Length of the first prefix of a long text that is tokenized, in characters per position of the
models' context; see `Bench._check_text`."""

_MAX_TOKENS_FACTOR = 2
"""A text is too long if a prefix has more tokens than this multiple of the context. The margin
allows for a token that the end of the prefix splits."""


class Bench:
    """Test bench: the loaded models of a run, with the tokenizer and the model states.

    A role is the purpose of a model. It is "target", "draft", or the name of another model that a
    method needs.

    Attributes:
        workspace: Decoders and their states.
        tokenizer: Tokenizer of the target, from transformers.
        module: Function that builds the transformers model of a role.
        facts: Facts from the config of each checkpoint, by role.
        device: Device of the target.
        energy: Meter of the energy that this device uses.
        peaks: Peak memory in bytes of each phase, such as loading and warming up.
        load_errors: Label of each method whose trained modules do not load -> the error.
        processor: Logits processor that enforces the run's grammar. None without a grammar.

    Args:
        plan: Plan of the run.
        lenient: True stores errors of trained modules in `load_errors`. False raises them.
    """

    def __init__(self, plan: Plan, *, lenient: bool = False) -> None:
        config = plan.config
        self._plan = plan
        self.device = choose_device(config.main_device)
        self._graphs = self._records_graphs()
        self.energy = EnergyMeter.for_device(self.device)
        self.peaks: dict[str, int] = {}
        reset_peak(self.device)
        self.placement = make_placement(plan, self.device) if plan.parallel else None
        check_threads(config.threads)
        if config.threads:
            torch.set_num_threads(config.threads)
        checkpoints = plan.checkpoints
        self.facts: dict[str, CheckpointFacts] = {
            role: read_checkpoint(read_checkpoint_facts, checkpoint)
            for role, checkpoint in checkpoints.items()
        }
        self.tokenizer = load_tokenizer(plan.target)
        self.processor = self._grammar_processor()
        translations = {role: self._translation(role, each) for role, each in checkpoints.items()}
        dtype: torch.dtype = getattr(torch, config.dtype)
        for device, roles in self._roles_by_device().items():
            check_memory([(checkpoints[r].label, self.facts[r]) for r in roles], dtype, device)
        ids = min(facts.vocab_size for facts in self.facts.values())
        imposed = None if config.acceptance is None else (config.acceptance, ids)
        load = partial(load_run_decoder, dtype=dtype, imposed=imposed, graphs=self._graphs)
        decoders = self._load_decoders(load, translations)
        self.context = min(decoder.max_positions for decoder in decoders.values())
        # Building a transformers model takes seconds, and few runs need one. So the model is built
        # at its first use.
        self.module = cache(
            lambda role: read_checkpoint(lambda _: get_module(decoders[role]), checkpoints[role])
        )
        self._heads: dict[ArtifactSpec, HeadFiles] = {}
        self.workspace = Workspace(decoders, 0, self.module, self.tokenizer, self._load_artifact)
        self.workspace.synthetic = plan.synthetic
        if self.placement is not None:
            self.workspace.transport = self.placement.transport
        if self._second_draft_device:
            self.workspace.decoder_factories = {
                "draft": partial(
                    load,
                    checkpoints["draft"].path,
                    name="draft",
                    device=self._second_draft_device,
                    input_vocab_size=self.facts["target"].vocab_size,
                )
            }
        self.load_errors = self._load_artifacts(lenient)
        self.store_peak("loading")

    def _records_graphs(self) -> bool:
        """Return True if forwards are recorded as CUDA graphs.

        Raises:
            EnvironmentFault: the run requires CUDA graphs, but the device is not a CUDA device.
        """
        config, on_gpu = self._plan.config, self.device.type == "cuda"
        if config.graphs == "on" and not on_gpu:
            raise EnvironmentFault(
                f"--graphs on: CUDA graphs need a CUDA device, and this run is on {self.device}",
                hint="choose --device cuda, or leave --graphs out",
            )
        return config.graphs != "off" and on_gpu

    def _load_decoders(
        self, load: Callable[..., Decoder], translations: Mapping[str, Translation | None]
    ) -> dict[str, Decoder]:
        """Load the decoder of each role.

        Args:
            load: Function that loads one decoder, see `load_run_decoder`.
            translations: Role -> translation of its model's vocabulary to the target's
                vocabulary.
        """
        plan, checkpoints = self._plan, self._plan.checkpoints
        decoders = {
            role: read_checkpoint(
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
            decoder.translation = translations[role]
        _check_encoders(decoders, checkpoints)
        if plan.config.contrast is not None and decoders["target"].split_prompt(())[1] is not None:
            raise UsageError(
                f"--contrast weakens the prompt in the target's text, and {plan.target.label} reads"
                " its prompt with an encoder or as images",
                hint="choose a --target that reads text only, or drop --contrast",
            )
        return decoders

    def _load_artifacts(self, lenient: bool) -> dict[str, SpecbenchError]:
        """Load the trained modules of the methods, such as draft heads.

        Return the errors by method.

        Args:
            lenient: True returns the errors. False raises the first error.
        """
        errors: dict[str, SpecbenchError] = {}
        for method_run in self._plan.method_runs:
            if method_run.label not in self._plan.isolated:
                try:
                    for wanted in method_run.method.artifacts():
                        self.workspace.artifact(wanted)
                except (UsageError, EnvironmentFault) as fault:
                    if not lenient:
                        raise
                    errors[method_run.label] = fault
        return errors

    def _grammar_processor(self) -> LogitsProcessor | None:
        grammar = self._plan.grammar
        if grammar is None:
            return None
        target = self.facts["target"]
        ends = [token for token in target.eos if token < target.vocab_size]
        return grammar.create_mask(self.tokenizer, ends, self._plan.target.label)

    @property
    def _second_draft_device(self) -> torch.device | None:
        """Return the device on which a parallel worker loads a second copy of the draft model.

        None if there is no second copy.
        """
        placement = self.placement
        return placement.device if placement is not None and placement.separate_draft else None

    def _roles_by_device(self) -> dict[torch.device, list[str]]:
        """Return the roles of the models on each device.

        A model that is loaded twice is listed twice.
        """
        roles = {self.device: list(self._plan.checkpoints)}
        if self._second_draft_device is not None:
            roles.setdefault(self._second_draft_device, []).append("draft")
        return roles

    def _translation(self, role: str, draft: Checkpoint) -> Translation | None:
        """Return the translation between the vocabularies of a draft model and the target.

        None if both have the same vocabulary.

        Raises:
            UsageError: the vocabularies differ, and a method that uses the draft model does not
                support different vocabularies.
        """
        if role == "target":
            return None
        target, theirs = self._plan.target, load_tokenizer(draft)
        differing = _count_differing_tokens(self.tokenizer, theirs, self.facts[role].vocab_size)
        if not differing:
            return None
        methods = [
            method_run.method
            for method_run in self._plan.method_runs
            if role in _draft_roles(method_run.method)
        ]
        if role != "draft" or not all(method.any_vocabulary for method in methods):
            names = sorted({m.name for m in methods if not m.any_vocabulary})
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

    def _load_artifact(self, wanted: ArtifactSpec) -> Any:
        """Load a trained module that a method needs, such as a draft head."""
        kind = wanted.kind
        target = self._plan.target
        files = resolve_head(
            wanted.source, kind.kind, target, in_target=kind.inside, hint=kind.hint
        )
        module = read_checkpoint(lambda path: kind.load(path, self.workspace.decoders), files)
        if self._graphs:
            record_graphs(module)
        self._heads[wanted] = files
        return module

    def encode_prompt(self, question: Question, answers: Sequence[Sequence[int]] = ()) -> list[int]:
        """Return the token ids of the prompt for one turn of a question.

        The prompt has all earlier turns with their answers, and then this turn. The number of
        answers determines the turn.

        Args:
            question: The question, which may have several turns.
            answers: Token ids of the answers to the earlier turns.

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
                f"prompt {name} has no tokens: the tokenizer of {label} drops all of its text",
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

    def stop_rule(self, budget: int) -> StopRule:
        """Return the rule that ends an output: at the EOS token, or after `budget` new tokens."""
        return StopRule(eos=self.facts["target"].eos, max_new_tokens=budget)

    def create_request(
        self, prompt_id: str, turn: int, ids: Sequence[int], stop: StopRule, topic: str = ""
    ) -> Request:
        """Return a request to the target model. It may contain images, or input of an encoder.

        Args:
            prompt_id, turn: Prompt id and turn of the prompt. Random noise depends on both.
            ids: Token ids of the prompt.
            stop: Rule that ends the output.
            topic: Category of the question, for methods that learn from earlier prompts.
        """
        return Request.create(self.workspace.decoders["target"], prompt_id, turn, ids, stop, topic)

    def create_prompt_request(self, prompt: Prompt, budget: int) -> Request:
        """Return the request of a prompt. Enlarge the model states so that prompt and output fit.

        Args:
            prompt: The prompt.
            budget: Maximum number of new tokens.
        """
        self.workspace.reserve(len(prompt.ids) + budget)
        at = prompt.prompt_id, prompt.turn, prompt.ids
        return self.create_request(*at, self.stop_rule(budget), prompt.category)

    def check_first_turns(self) -> None:
        """Raise PromptError if the target cannot decode the first turn of a question.

        A repeat calls this method before it measures. Later turns of a question contain answers,
        which do not exist yet. `PromptBuilder.build` checks the later turns.
        """
        faults: dict[str, PromptError] = {}
        began = monotonic()
        for question in self._plan.questions:
            try:
                ids = self.encode_prompt(question)
                self.check_fits(question.prompt_id, len(ids), self._plan.max_new_tokens(question))
            except PromptError as fault:
                faults[question.prompt_id] = fault
                if monotonic() - began > CHECK_TIME_S:  # a chat template can be slow
                    break
        if faults:
            first, *others = faults
            more = ""
            if others:
                named = ", ".join(others[:MAX_LISTED]) + (
                    ", ..." if len(others) > MAX_LISTED else ""
                )
                more = f" (and {len(others)} more failed: {named})"
            raise PromptError(faults[first].message + more, faults[first].hint)

    def _check_text(self, name: str, text: str) -> None:
        """Raise PromptError if a text has more tokens than the models can decode.

        Tokenizing a text of 50 MB would take minutes and gigabytes of memory. So this method
        tokenizes prefixes of increasing length, and stops at the first prefix that is too long.
        """
        most, end = _MAX_TOKENS_FACTOR * self.context, _CHARACTERS_PER_POSITION * self.context
        while end < len(text):
            tokens = len(self.tokenizer(text[:end], add_special_tokens=False).input_ids)
            if tokens > most:
                raise self._too_long_error(f"prompt {name} has more than {tokens} tokens; that is")
            end *= 4

    def check_fits(self, name: str, prompt: int, budget: int) -> None:
        """Raise PromptError if a prompt and its output may exceed the context of the models."""
        if prompt + budget > self.context:
            raise self._too_long_error(
                f"prompt {name} has {prompt} tokens; with {budget} new ones that is"
            )

    def _too_long_error(self, what: str) -> PromptError:
        """Return the error for a prompt that is longer than the context of the models.

        Args:
            what: Beginning of the error message, which contains the number of tokens.
        """
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

    def resolved_config(self) -> dict[str, Any]:
        """Return the settings that this machine determines: threads, device and CUDA graphs."""
        return {
            "threads": torch.get_num_threads(),
            "device": str(self.device),
            "graphs": "on" if self._graphs else "off",
        }

    @property
    def devices(self) -> dict[str, str] | None:
        """Return the devices of target and draft as text for the option --devices.

        None if the run has no parallel method.
        """
        return None if self.placement is None else dict(self.placement.device_names)

    def store_peak(self, phase: str) -> None:
        """Store the peak memory of a phase of the run, and reset the peak for the next phase."""
        self.peaks[phase] = max(self.peaks.get(phase, 0), peak_bytes(self.device))
        reset_peak(self.device)

    def memory_entry(self) -> dict[str, Any]:
        """Return the manifest entry about memory, in bytes.

        `again` is the size of the second copy of the draft model, which a parallel worker loads.
        `state_bytes` does not include the model states of this worker.
        """
        draft = (
            self.workspace.decoders["draft"].weight_bytes
            if self._second_draft_device is not None
            else 0
        )
        return {
            "weight_bytes": self.workspace.weight_bytes + draft,
            "state_bytes": self.workspace.state_bytes,
            "again": {"draft": draft} if draft else {},
            "peaks": dict(self.peaks),
        }

    def close(self) -> None:
        """End the worker processes of the test bench."""
        self.workspace.close()

    def model_entries(self) -> dict[str, Mapping[str, Any]]:
        """Return the manifest entries of the models."""
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

    def drafting_head_facts(self) -> dict[str, Mapping[str, Any]]:
        """Return facts that identify each draft head.

        The keys are the names of the heads in traces.
        """
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

    def head_entries(self) -> dict[str, Mapping[str, Any]]:
        """Return the manifest entries of the trained modules."""
        return {
            f"{wanted.kind.kind} {files.label}": {
                "sha256": Weights(files.path).sha256(),
                "weight_bytes": self.workspace.artifact(wanted).weight_bytes,
            }
            for wanted, files in self._heads.items()
        }


def load_run_decoder(
    path: Path,
    *,
    name: str,
    device: torch.device,
    dtype: torch.dtype,
    imposed: tuple[float, int] | None,
    graphs: bool = False,
    input_vocab_size: int = 0,
) -> Decoder:
    """Load the decoder of a checkpoint with the settings of a run.

    Args:
        path: Folder of the checkpoint.
        name: Name of the decoder.
        device: Device of its weights.
        dtype: Dtype of its weights.
        imposed: Acceptance rate that the run simulates (`engine.imposed_acceptance`), and the
            vocabulary size. None if the run does not simulate acceptance.
        graphs: True records forwards as CUDA graphs where possible.
        input_vocab_size: See `Decoder`.
    """
    decoder = load_decoder(path, name=name, device=device, dtype=dtype)
    decoder.input_vocab_size = input_vocab_size
    if graphs:
        record_graphs(decoder)
    return decoder if imposed is None else impose_acceptance(decoder, *imposed)


def record_graphs(model: Any) -> None:
    """Make a model record its forwards as CUDA graphs, if the model uses fused layers."""
    if isinstance(model, FusedStack):
        model.record(CudaGraphs(model.device))


def load_tokenizer(checkpoint: Checkpoint) -> Any:
    """Load the transformers tokenizer of a checkpoint.

    If the tokenizer has no chat template, use the template in specbench's model list, if any.

    Raises:
        EnvironmentFault: the files of the tokenizer are missing or damaged.
    """
    tokenizer = read_tokenizer(checkpoint.path, checkpoint.label)
    if checkpoint.template and not tokenizer.chat_template:
        tokenizer.chat_template = checkpoint.template
    tokenizer.model_max_length = sys.maxsize  # `check_fits` rejects long prompts
    return tokenizer


def read_checkpoint(read: Callable[[Path], _T], checkpoint: Checkpoint | HeadFiles) -> _T:
    """Call `read` with the folder of a checkpoint, and turn exceptions of `read` into clear errors.

    Raises:
        EnvironmentFault: files are truncated, or the config does not describe the model.
    """
    try:
        return read(checkpoint.path)
    except (SafetensorError, StructError, JSONDecodeError, OSError) as error:
        reason = str(error).strip().partition("\n")[0]
        raise EnvironmentFault(
            f"the files of {checkpoint.label} are damaged or truncated: {reason}",
            hint=f"delete {checkpoint.path} and download it again",
        ) from error
    except SpecbenchError:
        raise
    except Exception as error:  # a wrong config can raise any error
        reason = str(error).strip().partition("\n")[0] or type(error).__name__
        raise EnvironmentFault(
            f"no model can be built from the files of {checkpoint.label}: {reason}",
            hint="compare its config.json with the published one; --traceback shows details",
        ) from error


def check_memory(
    models: Sequence[tuple[str, CheckpointFacts]],
    dtype: torch.dtype,
    device: torch.device,
) -> None:
    """Raise EnvironmentFault if the weights alone do not fit in the device's free memory.

    Args:
        models: Label of each model on the device, and facts from its config.
    """
    parameters = sum(facts.parameters for _, facts in models)
    needed = parameters * dtype.itemsize
    free = (
        torch.cuda.mem_get_info(device)[0]
        if device.type == "cuda"
        else psutil.virtual_memory().available
    )
    if needed > free:
        names = " and ".join(label for label, _ in models)
        lean = f"--dtype bfloat16 ({parameters * 2 / 1e9:.3g} GB), " if dtype.itemsize > 2 else ""
        raise EnvironmentFault(
            f"{names}: {needed / 1e9:.3g} GB ({needed:,} bytes) of weights in"
            f" {str(dtype).removeprefix('torch.')}, and {device} has {free / 1e9:.3g} GB"
            f" ({free:,}) free",
            hint=f"{lean}a smaller --target, or another --device",
        )


def _check_encoders(decoders: Mapping[str, Decoder], checkpoints: Mapping[str, Checkpoint]) -> None:
    """Raise UsageError if a draft model needs an encoder and the target has no encoder."""

    def encodes(decoder: Decoder) -> bool:
        _, source = decoder.split_prompt(())
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


def _draft_roles(method: Method) -> set[str]:
    """Return the roles of all models, other than the target, that a method needs."""
    return {*method.models(), *(("draft",) if "draft" in method.requirements else ())}


def _count_differing_tokens(ours: Any, theirs: Any, width: int) -> int:
    """Count the target's token ids that have another meaning, or no meaning, in the draft model.

    Token ids that only the draft model has are not counted.

    Args:
        ours, theirs: Tokenizers of the target and of the draft model.
        width: Number of token ids that the draft model has an embedding for.
    """
    at = {index: token for token, index in theirs.get_vocab().items()}
    return sum(
        index >= width or at.get(index, token) != token for token, index in ours.get_vocab().items()
    )

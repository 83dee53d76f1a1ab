"""Public API for methods and heads. It follows semantic versioning.

>>> from specbench_cli.api import Draft, Method, MethodParams, Session

All other modules may change in any release. The groups below are ordered from names that every
method needs to names that few methods need.
"""

from __future__ import annotations

import pathlib

# Base classes of a method and of its parameters. `NumberOrAuto` is the type of a parameter that is
# a whole number or `AUTO`. With `AUTO`, the engine chooses the number from measured forward costs
# (`Method.uses_costs`). `Widths` are the numbers of tree nodes, one per level.
from pydantic import Field
from specbench_cli.engine.method import Method
from specbench_cli.engine.batch import Batch
from specbench_cli.engine.params import AUTO, Claim, MethodParams, NumberOrAuto, Widths, WordList

# The session of a request contains all that a method needs to decode it. A peer is a method of
# another project, with its own decoding loop.
from specbench_cli.engine.session import Session
from specbench_cli.engine.peer_session import PeerSession
from specbench_cli.engine.sequence import StopRule
from specbench_cli.engine.verify.sampling import Sampling, hash_key

# Input and output of a model forward, and the model class, which runs and counts forwards.
from specbench_cli.engine.types import SUBLAYERS, Features, Hidden, Input, ModelOutput, Tokens
from specbench_cli.engine.models.decoder import Decoder, LogitsAt, ModelInput, Part, State
from specbench_cli.engine.models.meter import Metered
from specbench_cli.engine.partial import Partial

# Drafts, the ways to draw draft tokens, and the results of verification.
from specbench_cli.engine.types import Draft, Guarantee, DrawMode, Origin, Outcome, Rule, Step
from specbench_cli.engine.verify.choosing import Pick

# Accept rules of lossy methods, and the parameters that select one.
from specbench_cli.engine.verify.accept import AcceptParams, AcceptRule, DraftContext
from specbench_cli.engine.verify.random import Random

# A segment is several tokens that the draft model writes, such as a reasoning step. A rule of the
# method accepts or rejects a segment as a whole. The engine counts the kept and discarded tokens of
# each model.
from specbench_cli.engine.segments.rules import SegmentParams, SegmentRule
from specbench_cli.engine.segments.segments import Segments, mean_log_prob

# Drafts that are chains of tokens, for one or several sequences. The draft length is a number, or a
# rule that decides after each draft token whether to add another one.
from specbench_cli.engine.drafting.chains import draft_chains, draw_chain
from specbench_cli.engine.drafting.draft_model_method import DraftModelMethod
from specbench_cli.engine.drafting.length_params import LengthParams, LengthRule
from specbench_cli.engine.drafting.length_rules import create_length_rule
from specbench_cli.engine.drafting.lengths import FixedLength, Length

# A classifier of prompts by topic, for methods that learn while they decode.
from specbench_cli.engine.learning import Topics

# Drafts that are trees, drafted with one forward per level (`Levels`). A tree has a fixed shape
# (`TreeTemplate`, `fill`), or grows where the draft model is confident (`Growth`): `grow` calls
# `expand` and `rerank`. `create_size_rule` chooses the number of nodes, up to `max_nodes`.
from specbench_cli.engine.verify.tree import ROOT
from specbench_cli.engine.drafting.levels import HeadLevels, Levels
from specbench_cli.engine.drafting.template import (
    TreeTemplate,
    best_tree,
    fill,
    fill_from,
    tree_of_choices,
    tree_of_widths,
)
from specbench_cli.engine.drafting.growth import (
    CandidateNodes,
    SelectedNodes,
    GrownTree,
    Growth,
    expand,
    grow,
    rerank,
    create_size_rule,
)
from specbench_cli.engine.drafting.growth_params import GrowthParams, Nodes, max_nodes

# Drafting from fixed texts without a model: find all occurrences of a token sequence.
from specbench_cli.engine.drafting.suffix_array import SuffixArray

# The text of draft tokens, for a draft model with another tokenizer than the target's.
from specbench_cli.engine.drafting.transcript import Transcript

# For methods that verify trees with their own code: tree shapes, merged trees, acceptance of
# siblings (`siblings`), order of tokens (`ranking`), and transfers between device and host
# (`host`).
from specbench_cli.engine import host
from specbench_cli.engine.verify import ranking, siblings
from specbench_cli.engine.verify.tree import merge_trees, build_tree_mask, build_tree

# Drafting in parallel with the target: a drafter in a worker process, and its messages.
from specbench_cli.engine.workers.drafter import DraftSession, Drafter
from specbench_cli.engine.workers.message import Message
from specbench_cli.engine.workers.transport import Worker

# For drafting in parallel: drafts that a worker prepares for several possible verification
# outcomes.
from specbench_cli.engine.workers.rollouts import (
    Guess,
    Preparer,
    Rollouts,
    DraftWindows,
    guess_outcomes,
)

# Trained modules: specification (`ArtifactSpec`), base class (`Artifact`), draft heads (`Head`),
# and their checkpoints.
from specbench_cli.engine.models.artifact import Artifact, ArtifactSpec
from specbench_cli.engine.models.head import (
    NORMED,
    FeatureHead,
    Head,
    LookAhead,
    LevelOutput,
    SequentialHead,
)
from specbench_cli.engine.models.checkpoint import (
    Weights,
    pickle_fault,
    read_config,
    read_output_ids,
    output_id_tensors,
)
from specbench_cli.engine.models.state import KVState, LayerShape

# Fast implementations of heads and draft models: rotary embeddings, layer stacks, a full decoder.
from specbench_cli.engine.models.attention import RotaryEmbedding
from specbench_cli.engine.models.fused import ROPE_TYPES, FusedDecoder, FusedStack, fits
from specbench_cli.engine.models.layers import (
    LayerWeights,
    LayerReader,
    layer_bytes,
    scatter_logits,
)
from specbench_cli.engine.models.forward_plan import Scratch

# Exceptions for problems of the environment, of a method, and of the user's input.
from specbench_cli.errors import EnvironmentFault, MethodFault, UsageError

__all__ = [
    "AUTO",
    "NORMED",
    "ROOT",
    "ROPE_TYPES",
    "SUBLAYERS",
    "AcceptParams",
    "AcceptRule",
    "Artifact",
    "ArtifactSpec",
    "Batch",
    "CandidateNodes",
    "Claim",
    "Decoder",
    "Draft",
    "DraftContext",
    "DraftModelMethod",
    "DraftSession",
    "DraftWindows",
    "Drafter",
    "DrawMode",
    "EnvironmentFault",
    "FeatureHead",
    "Features",
    "Field",
    "FixedLength",
    "FusedDecoder",
    "FusedStack",
    "GrownTree",
    "Growth",
    "GrowthParams",
    "Guarantee",
    "Guess",
    "Head",
    "HeadLevels",
    "Hidden",
    "Input",
    "KVState",
    "LayerReader",
    "LayerShape",
    "LayerWeights",
    "Length",
    "LengthParams",
    "LengthRule",
    "LevelOutput",
    "Levels",
    "LogitsAt",
    "LookAhead",
    "Message",
    "Metered",
    "Method",
    "MethodFault",
    "MethodParams",
    "ModelInput",
    "ModelOutput",
    "Nodes",
    "NumberOrAuto",
    "Origin",
    "Outcome",
    "Part",
    "Partial",
    "PeerSession",
    "Pick",
    "Preparer",
    "Random",
    "Rollouts",
    "RotaryEmbedding",
    "Rule",
    "Sampling",
    "Scratch",
    "SegmentParams",
    "SegmentRule",
    "Segments",
    "SelectedNodes",
    "SequentialHead",
    "Session",
    "State",
    "Step",
    "StopRule",
    "SuffixArray",
    "Tokens",
    "Topics",
    "Transcript",
    "TreeTemplate",
    "UsageError",
    "Weights",
    "Widths",
    "WordList",
    "Worker",
    "best_tree",
    "build_tree",
    "build_tree_mask",
    "config_of",
    "create_length_rule",
    "create_size_rule",
    "draft_chains",
    "draw_chain",
    "expand",
    "fill",
    "fill_from",
    "fits",
    "grow",
    "guess_outcomes",
    "hash_key",
    "host",
    "layer_bytes",
    "load_weights",
    "max_nodes",
    "mean_log_prob",
    "merge_trees",
    "output_id_tensors",
    "pickle_fault",
    "ranking",
    "read_config",
    "read_output_ids",
    "rerank",
    "scatter_logits",
    "sha256_of",
    "siblings",
    "tree_of_choices",
    "tree_of_widths",
]


def sha256_of(decoder: Decoder, file: str | None = None) -> str | None:
    """Return the SHA-256 of a decoder's weight files, or of another file in their folder.

    Return None if the decoder was not loaded from a folder, or the file does not exist.
    """
    # Import here, because this module imports torch, which takes a second.
    from specbench_cli.engine.models import load

    return load.sha256_of(decoder, file)


def load_weights(folder: pathlib.Path, config: object) -> Weights:
    """Return the weights of a model in a folder.

    The function `fits` returns whether the model's architecture is supported.

    Raises:
        EnvironmentFault: the tensors do not match the config.
    """
    from specbench_cli.engine.models import load

    return load.load_weights(folder, config)


def config_of(decoder: Decoder) -> dict[str, object]:
    """Return the content of config.json in a decoder's folder, or {} if it was not loaded from
    one.
    """
    from specbench_cli.engine.models import load

    return dict(load.config_of(decoder))


FORMER_NAMES = {
    "Candidates": "CandidateNodes",
    "Chosen": "SelectedNodes",
    "Desk": "DraftSession",
    "Fixed": "FixedLength",
    "Grown": "GrownTree",
    "Law": "DrawMode",
    "Layer": "LayerWeights",
    "Out": "ModelOutput",
    "Places": "DraftContext",
    "Said": "LevelOutput",
    "SpanParams": "SegmentParams",
    "SpanRule": "SegmentRule",
    "Spans": "Segments",
    "Template": "TreeTemplate",
    "Trained": "ArtifactSpec",
    "Windows": "DraftWindows",
    "drawn_at_once": "draw_chain",
    "guesses": "guess_outcomes",
    "key_of": "hash_key",
    "merge": "merge_trees",
    "most": "max_nodes",
    "rows_of": "build_tree_mask",
    "rule_of": "create_length_rule",
    "said_ids": "read_output_ids",
    "select": "rerank",
    "size_of": "create_size_rule",
    "spread": "scatter_logits",
    "told_ids": "output_id_tensors",
    "tree_of": "build_tree",
}
"""Current name of each member of this module by its former name."""


def __getattr__(name: str) -> object:
    """Return a member of this module by its former name, with a DeprecationWarning."""
    from specbench_cli.former_names import get_renamed

    return get_renamed(__name__, FORMER_NAMES, name)

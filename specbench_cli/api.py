"""Interface for authors of methods and heads. Changes of it follow semantic versioning.

    from specbench_cli.api import Draft, Method, MethodParams, Session

Other names belong to the engine and may change at any time. The groups of imports go from what
every method needs to what few methods need.
"""

from __future__ import annotations

import pathlib

# A method, and its parameters: a `Field` each; `NumberOrAuto` is a whole number or `AUTO`, what
# pays best at what forwards cost here (`Method.uses_costs`); `Widths` are a tree's, level by level.
from pydantic import Field
from specbench_cli.engine.method import Method
from specbench_cli.engine.batch import Batch
from specbench_cli.engine.params import AUTO, Claim, MethodParams, NumberOrAuto, Widths, WordList

# All that it may touch while it decodes. A peer, which decodes by means of its own, gets another.
from specbench_cli.engine.session import Session
from specbench_cli.engine.peer_session import PeerSession
from specbench_cli.engine.sequence import StopRule
from specbench_cli.engine.verify.sampling import Sampling, hash_key

# What goes into a forward and comes out of it, and the model that runs it, seen through a meter.
from specbench_cli.engine.types import SUBLAYERS, Features, Hidden, Input, ModelOutput, Tokens
from specbench_cli.engine.models.decoder import Decoder, LogitsAt, ModelInput, Part, State
from specbench_cli.engine.models.meter import Metered
from specbench_cli.engine.partial import Partial

# What is proposed, how its tokens were chosen, what became of it.
from specbench_cli.engine.types import Draft, Guarantee, DrawMode, Origin, Outcome, Rule, Step
from specbench_cli.engine.verify.choosing import Pick

# What stands beside what the lossless rule takes: a rule, and the parameters that choose one.
from specbench_cli.engine.verify.accept import AcceptParams, AcceptRule, DraftContext
from specbench_cli.engine.verify.random import Random

# Texts that draft and target write span by span: a span is drafted, graded by a method, and stands
# as a whole if its rule says so; a ledger has what each wrote, and what became of it.
from specbench_cli.engine.spans.judge import SegmentParams, SegmentRule
from specbench_cli.engine.spans.segments import Segments, mean_log_prob

# Chains: of several sequences at once, and how long they get: by a number, or by a rule that
# decides once a token is kept.
from specbench_cli.engine.drafting.chains import draft_chains, draw_chain
from specbench_cli.engine.drafting.draft_model_method import DraftModelMethod
from specbench_cli.engine.drafting.length_params import LengthParams, LengthRule
from specbench_cli.engine.drafting.length_rules import create_length_rule
from specbench_cli.engine.drafting.lengths import FixedLength, Length

# A row that learns: which of its drafts a prompt is for, by its tokens.
from specbench_cli.engine.learning import Topics

# Trees. All nodes of a level are fed in one forward (`Levels`). Their shape is a template's, filled
# by rank (`fill`), or grows where the draft is sure of itself (`Growth`, level by level): `grow` is
# `expand` and then `select`; `create_size_rule` chooses how many nodes pay here, at `max_nodes` so
# many.
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
    select,
    create_size_rule,
)
from specbench_cli.engine.drafting.growth_params import GrowthParams, Nodes, max_nodes

# A draft without a model: all places of any string in texts that do not change.
from specbench_cli.engine.drafting.suffix_array import SuffixArray

# A draft model with a tokenizer of its own: the text as it reads it.
from specbench_cli.engine.drafting.transcript import Transcript

# For stages that verify each other's trees: the shape of one, or of several as one, who stands
# (`siblings`), which tokens come first (`ranking`), and the way of ids and numbers between a device
# and its `host`.
from specbench_cli.engine import host
from specbench_cli.engine.verify import ranking, siblings
from specbench_cli.engine.verify.tree import merge_trees, build_tree_mask, build_tree

# Drafting beside the target: a drafter at its desk, in a worker of its own that takes messages.
from specbench_cli.engine.workers.drafter import Desk, Drafter
from specbench_cli.engine.workers.message import Message
from specbench_cli.engine.workers.transport import Worker

# Windows that such a drafter prepares for several outcomes at once, and the two sides of them.
from specbench_cli.engine.workers.rollouts import Guess, Preparer, Rollouts, Windows, guesses

# Trained modules: what a method asks for (`Trained`), what a class of them must do (`Artifact`),
# draft heads (`Head`), and their checkpoints.
from specbench_cli.engine.models.artifact import Artifact, Trained
from specbench_cli.engine.models.head import (
    NORMED,
    FeatureHead,
    Head,
    LookAhead,
    Said,
    SequentialHead,
)
from specbench_cli.engine.models.checkpoint import (
    Weights,
    pickle_fault,
    read_config,
    said_ids,
    told_ids,
)
from specbench_cli.engine.models.state import KVState, LayerShape

# The fused path of heads and draft models: a stack of layers, their positions, how they are read, a
# whole decoder.
from specbench_cli.engine.models.attention import RotaryEmbedding
from specbench_cli.engine.models.fused import ROPE_TYPES, FusedDecoder, FusedStack, fits
from specbench_cli.engine.models.layers import Layer, LayerReader, layer_bytes, spread
from specbench_cli.engine.models.plan import Scratch

# Whose fault it is: of the machine, of a method, of what the user typed.
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
    "Batch",
    "CandidateNodes",
    "Claim",
    "Decoder",
    "Desk",
    "Draft",
    "DraftContext",
    "DraftModelMethod",
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
    "Layer",
    "LayerReader",
    "LayerShape",
    "Length",
    "LengthParams",
    "LengthRule",
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
    "Said",
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
    "Trained",
    "Transcript",
    "TreeTemplate",
    "UsageError",
    "Weights",
    "Widths",
    "Windows",
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
    "guesses",
    "hash_key",
    "host",
    "layer_bytes",
    "load_weights",
    "max_nodes",
    "mean_log_prob",
    "merge_trees",
    "pickle_fault",
    "ranking",
    "read_config",
    "said_ids",
    "select",
    "sha256_of",
    "siblings",
    "spread",
    "told_ids",
    "tree_of_choices",
    "tree_of_widths",
]


def sha256_of(decoder: Decoder, file: str | None = None) -> str | None:
    """Hash of the weight files that a decoder was loaded from, or of another file beside them; None
    if it was not loaded, or there is no such file."""
    # What loads models takes a second to import; whoever has a decoder has imported it already.
    from specbench_cli.engine.models import load

    return load.sha256_of(decoder, file)


def load_weights(folder: pathlib.Path, config: object) -> Weights:
    """Return the tensors of a model of a family that `fits`.

    Raises:
        EnvironmentFault: the tensors are not the ones that the config requires.
    """
    from specbench_cli.engine.models import load

    return load.load_weights(folder, config)


def config_of(decoder: Decoder) -> dict[str, object]:
    """config.json of the folder that a decoder was loaded from; empty if there is none."""
    from specbench_cli.engine.models import load

    return dict(load.config_of(decoder))

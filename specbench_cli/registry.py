"""Methods by name: ours (a static table), other distributions' (entry points), a file's (--plugin).

Nothing is imported before it is asked for: `specbench list methods` reads the table and no torch. A
test holds the table equal to the classes.
"""

from __future__ import annotations

import importlib
import importlib.util
import inspect
from collections.abc import Mapping
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import TYPE_CHECKING, Any

from specbench_cli.config.problems import did_you_mean, usage_error
from specbench_cli.errors import UsageError

if TYPE_CHECKING:
    from specbench_cli.api import Claim, Method, MethodParams

GROUP = "specbench.methods"
"""Entry-point group of other distributions' methods."""

NEIGHBOURS = ("methods", "datasets_cfg")
"""Our other top-level packages, whose names somebody else's package may bear too."""

LOSSLESS = "lossless"
"""With default parameters: vanilla's very tokens, or under rejection the target's law."""

LOSSY = "lossy"
"""With default parameters neither: runs show it beside what its answers lose."""


@dataclass(frozen=True, slots=True)
class Entry:
    """What is known of a method without importing it.

    Attributes:
        target: "package.module:Class".
        summary: first line of the class's docstring.
        aliases: other names it answers to.
        needs: what it cannot run without.
        peer: whether it is somebody else's implementation, measured but not audited.
        baseline: the method that its speedups are over: of another engine, that one's vanilla.
        guarantee: what it promises of its output; empty where only the class says.
        source: the paper or project that it comes from.
        origin: who registered it: "specbench", a distribution, or a file.
    """

    target: str
    summary: str
    aliases: tuple[str, ...] = ()
    needs: tuple[str, ...] = ()
    peer: bool = False
    baseline: str = "vanilla"
    guarantee: str = LOSSLESS
    source: str = ""
    origin: str = "specbench"


@dataclass(frozen=True, slots=True)
class Papers:
    """What a method's sources are called and report.

    citation: BibTeX entries; empty where there is none. claims: their confirmed speedups.
    """

    citation: str = ""
    claims: tuple[Claim, ...] = ()


METHODS: dict[str, Entry] = {
    "vanilla": Entry(
        "methods.vanilla:Vanilla",
        "Vanilla autoregressive decoding: one target forward a token.",
        aliases=("autoregressive", "ar"),
    ),
    "sps": Entry(
        "methods.sps:Sps",
        "Speculative sampling: a small model drafts a chain, the target scores it in one forward.",
        aliases=("sd", "speculative"),
        needs=("draft",),
        source="arXiv:2211.17192, arXiv:2302.01318",
    ),
    "tli": Entry(
        "methods.tli:Tli",
        "TLI: a draft with another tokenizer draws from the tokens that both vocabularies have.",
        needs=("draft",),
        source="arXiv:2502.05202",
    ),
    "uag": Entry(
        "methods.uag:Uag",
        "UAG: a draft with any tokenizer writes on, and its text is tokenized for the target.",
        aliases=("slem",),
        needs=("draft",),
        source="arXiv:2502.05202",
    ),
    "omnidraft": Entry(
        "methods.omnidraft:OmniDraft",
        "OmniDraft: several tokens of a draft that spell one of the target's are drafted as that"
        " one.",
        needs=("draft",),
        source="arXiv:2507.02659",
    ),
    "osd": Entry(
        "methods.osd:Osd",
        "OSD: the draft learns, between requests, the target's law at each place it was rejected.",
        aliases=("online",),
        needs=("draft",),
        source="arXiv:2310.07177",
    ),
    "s2d": Entry(
        "methods.s2d:S2d",
        "S2D: a draft's first layers draft where they are sure, the next ones where they are not.",
        aliases=("sorted",),
        needs=("draft",),
        source="arXiv:2407.01955",
    ),
    "typical": Entry(
        "methods.typical:TypicalAcceptance",
        "Typical: a draft token stands that the target finds likely, by how sure it is of its own.",
        needs=("draft",),
        guarantee=LOSSY,
        source="arXiv:2401.10774",
    ),
    "lenient": Entry(
        "methods.lenient:Lenience",
        "Lenient: a draft token stands if it would were the target's p so many times as high.",
        aliases=("lenience",),
        needs=("draft",),
        guarantee=LOSSY,
        source="arXiv:2211.17192",
    ),
    "judge": Entry(
        "methods.judge:Judge",
        "Judge: a small head on the target's rows lets harmless deviations of the draft pass.",
        needs=("draft",),
        guarantee=LOSSY,
        source="arXiv:2501.19309",
    ),
    "cdsl": Entry(
        "methods.cdsl:Cdsl",
        "CDSL: a draft stands if it helps to hold the wanted words; else the next token looks"
        " ahead.",
        needs=("draft",),
        guarantee=LOSSY,
        source="arXiv:2412.10418",
    ),
    "specee": Entry(
        "methods.specee:SpecEE",
        "SpecEE: the target leaves out its last layers where a draft's tokens settle early.",
        needs=("draft",),
        guarantee=LOSSY,
        source="arXiv:2504.08850",
    ),
    "random-accept": Entry(
        "methods.random_accept:RandomAcceptance",
        "Random accept: a rejected draft token passes by the toss of a coin; a control of rules.",
        needs=("draft",),
        guarantee=LOSSY,
    ),
    "draft-alone": Entry(
        "methods.draft_alone:DraftAlone",
        "Draft alone: plain decoding with the draft model; a control of all that is not exact.",
        needs=("draft",),
        guarantee=LOSSY,
    ),
    "sps-tree": Entry(
        "methods.sps_tree:SpsTree",
        "Tree speculative sampling: a small model drafts a tree, the target scores it in one"
        " forward.",
        needs=("draft",),
        source="arXiv:2305.09781, arXiv:2402.14160",
    ),
    "rsd-c": Entry(
        "methods.rsd_c:RsdC",
        "RSD-C: every node of a level has as many children, drawn without replacement.",
        needs=("draft",),
        source="arXiv:2402.14160",
    ),
    "rsd-s": Entry(
        "methods.rsd_s:RsdS",
        "RSD-S: stochastic beam search draws the tree's levels, paths without replacement.",
        needs=("draft",),
        source="arXiv:2402.14160",
    ),
    "sequoia": Entry(
        "methods.sequoia:Sequoia",
        "Sequoia: the static tree that acceptance by rank, as measured, makes the best.",
        needs=("draft",),
        source="arXiv:2402.12374",
    ),
    "dyspec": Entry(
        "methods.dyspec:DySpec",
        "DySpec: the tree grows by draws, next where the draft is likeliest to have a token"
        " accepted.",
        needs=("draft",),
        source="arXiv:2410.11744",
    ),
    "specdec++": Entry(
        "methods.specdecpp:SpecDecPP",
        "SpecDec++: a trained head predicts acceptance, drafting stops once a rejection is likely.",
        aliases=("specdecpp",),
        needs=("draft",),
        source="arXiv:2405.19715",
    ),
    "eqspec": Entry(
        "methods.eqspec:EqSpec",
        "EQSPEC: sequences draft together, and each keeps what it accepted, whatever others did.",
        needs=("draft",),
        source="arXiv:2510.22876",
    ),
    "exspec": Entry(
        "methods.exspec:ExSpec",
        "EXSPEC: of a window of sequences, those that are equally long take a step together.",
        needs=("draft",),
        source="arXiv:2510.22876",
    ),
    "staged": Entry(
        "methods.staged:Staged",
        "Staged speculative decoding: the draft model has a draft of its own, and drafts a tree.",
        needs=("draft",),
        source="arXiv:2308.04623",
    ),
    "specreason": Entry(
        "methods.specreason:SpecReason",
        "SpecReason: the draft writes a step; the target grades it, and writes a bad one anew.",
        needs=("draft",),
        guarantee=LOSSY,
        source="arXiv:2504.07891",
    ),
    "atts": Entry(
        "methods.atts:Atts",
        "ATTS: of the draft's chunks those are replaced that the target finds strangest, a share.",
        needs=("draft",),
        guarantee=LOSSY,
        source="arXiv:2509.15148",
    ),
    "speculative-thinking": Entry(
        "methods.speculative_thinking:SpeculativeThinking",
        "Speculative Thinking: the draft writes, and the target where it affirms or doubts.",
        needs=("draft",),
        guarantee=LOSSY,
        source="arXiv:2504.12329",
    ),
    "pearl": Entry(
        "methods.pearl:Pearl",
        "PEARL: the draft goes on drafting while the target verifies what it drafted before.",
        needs=("draft",),
        source="arXiv:2408.11850",
    ),
    "eagle": Entry(
        "methods.eagle:Eagle",
        "EAGLE: a one-layer head on the target's features, one token ahead, drafts a static tree.",
        aliases=("eagle1",),
        needs=("head",),
        source="arXiv:2401.15077",
    ),
    "eagle2": Entry(
        "methods.eagle2:Eagle2",
        "EAGLE-2: EAGLE's head, whose tree grows where the head is sure of itself.",
        needs=("head",),
        source="arXiv:2406.16858",
    ),
    "eagle3": Entry(
        "methods.eagle3:Eagle3",
        "EAGLE-3: a head over three of the target's layers, trained on its own drafts, grows the"
        " tree.",
        needs=("head",),
        source="arXiv:2503.01840",
    ),
    "medusa": Entry(
        "methods.medusa:Medusa",
        "Medusa: heads on the target's last row, each one token further ahead, fill a static tree.",
        needs=("head",),
        source="arXiv:2401.10774",
    ),
    "hydra": Entry(
        "methods.hydra:Hydra",
        "Hydra: heads on the target's last row and the tokens drafted so far fill a static tree.",
        needs=("head",),
        source="arXiv:2402.05109",
    ),
    "hydra++": Entry(
        "methods.hydra_plus:HydraPlus",
        "Hydra++: Hydra's heads read a layer's attention over the whole prefix, not the last row.",
        aliases=("hydra-plus",),
        needs=("head",),
        source="arXiv:2402.05109",
    ),
    "clover": Entry(
        "methods.clover:Clover",
        "Clover: regressive attention over drafted tokens, and a tree pruned to a budget.",
        needs=("head",),
        source="arXiv:2405.00263",
    ),
    "p-eagle": Entry(
        "methods.peagle:PEagle",
        "P-EAGLE: EAGLE-3's head reads masks behind the text, and drafts a whole chain in one"
        " forward.",
        needs=("head",),
        source="arXiv:2602.01469",
    ),
    "dflash": Entry(
        "methods.dflash:DFlash",
        "DFlash: a block of mask tokens beside the target's features is denoised in one forward.",
        needs=("head",),
        source="arXiv:2602.06036",
    ),
    "pard": Entry(
        "methods.pard:Pard",
        "PARD: a draft model adapted to mask tokens says a whole chain in one forward.",
        needs=("head",),
        source="arXiv:2504.18583",
    ),
    "falcon": Entry(
        "methods.falcon:Falcon",
        "Falcon: a head that predicts a block of features a pass drafts a tree, block by block.",
        needs=("head",),
        source="arXiv:2412.12639",
    ),
    "chimera": Entry(
        "methods.chimera:Chimera",
        "Chimera: trigrams of what is drafted, and one layer over all of the target's rows, draft.",
        needs=("head",),
        source="arXiv:2402.15758",
    ),
    "hidden-transfer": Entry(
        "methods.hidden_transfer:HiddenTransfer",
        "Hidden Transfer: pseudo states, mapped from a middle layer, say ahead through the upper"
        " ones.",
        needs=("head",),
        source="arXiv:2404.12022",
    ),
    "space": Entry(
        "methods.space:Space",
        "SPACE: a target tuned to fill mask tokens verifies a draft and makes the next in one"
        " forward.",
        needs=("head",),
        source="arXiv:2402.11809",
    ),
    "mtp": Entry(
        "methods.mtp:Mtp",
        "Multi-token prediction: a layer trained with the target drafts a chain, fed its own"
        " output.",
        needs=("head",),
        source="arXiv:2412.19437",
    ),
    "pld": Entry(
        "methods.pld:Pld",
        "Prompt lookup: the draft is what followed an earlier occurrence of the current suffix.",
        aliases=("prompt-lookup",),
        source="github.com/apoorvumang/prompt-lookup-decoding",
    ),
    "suffix": Entry(
        "methods.suffix:Suffix",
        "SuffixDecoding: suffix trees over this text and earlier outputs; a longer match drafts"
        " more.",
        source="arXiv:2411.04975",
    ),
    "sam": Entry(
        "methods.sam:Sam",
        "SAM-Decoding: a suffix automaton finds the longest suffix seen before, and drafts on from"
        " it.",
        source="arXiv:2411.10666",
    ),
    "rest": Entry(
        "methods.rest:Rest",
        "REST: what followed the text's end in a datastore, as often as it did, makes the tree.",
        source="arXiv:2311.08252",
    ),
    "token-recycling": Entry(
        "methods.token_recycling:TokenRecycling",
        "Token Recycling: what the target found likely after a token is kept, and unfolds to a"
        " tree.",
        source="arXiv:2408.08696",
    ),
    "lookahead": Entry(
        "methods.lookahead:Lookahead",
        "Lookahead decoding: Jacobi iterations on a window of guesses yield n-grams to verify.",
        source="arXiv:2402.02057",
    ),
    "stand": Entry(
        "methods.stand:Stand",
        "STAND: children are drawn from what the target said after the n-gram before, averaged.",
        source="arXiv:2506.04708",
    ),
    "layerskip": Entry(
        "methods.layerskip:LayerSkip",
        "LayerSkip: the target's first layers draft, the others verify and go on from their rows.",
        source="arXiv:2404.16710",
    ),
    "del": Entry(
        "methods.dynamic_exit:Del",
        "DEL: the exit that drafts, and how long, by what every exit would have had accepted.",
        source="arXiv:2504.05598",
    ),
    "swift": Entry(
        "methods.swift:Swift",
        "SWIFT: the target drafts without some of its sublayers; which ones is searched meanwhile.",
        source="arXiv:2410.06916",
    ),
    "mirror": Entry(
        "methods.mirror:Mirror",
        "Mirror-SD: the target's early exit names likely outcomes, the draft prepares for each.",
        needs=("draft",),
        source="arXiv:2510.13161",
    ),
    "ssd": Entry(
        "methods.ssd:Ssd",
        "SSD: while the target verifies a window, the draft prepares for every likely outcome of"
        " it.",
        needs=("draft",),
        source="github.com/sgl-project/sglang/issues/27462",
    ),
    "hf:vanilla": Entry(
        "methods.hf:HfVanilla",
        "transformers' plain decoding; the others add candidates to it.",
        peer=True,
        source="transformers",
    ),
    "hf:assisted": Entry(
        "methods.hf:HfAssisted",
        "transformers' assisted generation: constant schedule, no stop at low confidence.",
        needs=("draft",),
        peer=True,
        source="transformers",
    ),
    "hf:early-exit": Entry(
        "methods.hf:HfEarlyExit",
        "transformers' early exit: the target's first layers are the assistant, with a cache"
        " apart.",
        peer=True,
        source="transformers",
    ),
    "hf:dflash": Entry(
        "methods.hf:HfDFlash",
        "transformers' DFlash: its candidate generator with our head's weights in its own module.",
        needs=("head",),
        peer=True,
        source="transformers",
    ),
    "hf:prompt-lookup": Entry(
        "methods.hf:HfPromptLookup",
        "transformers' prompt lookup. It drafts past the budget: its last step may lack the bonus.",
        peer=True,
        source="transformers",
    ),
    "engine:openvino": Entry(
        "methods.engine_openvino:OpenVino",
        "OpenVINO GenAI's plain decoding: the baseline of its other rows.",
        peer=True,
        baseline="engine:openvino",
        source="github.com/openvinotoolkit/openvino.genai",
    ),
    "engine:openvino-draft": Entry(
        "methods.engine_openvino:OpenVinoDraft",
        "OpenVINO GenAI's speculative decoding with a draft model, of constant length.",
        needs=("draft",),
        peer=True,
        baseline="engine:openvino",
        source="github.com/openvinotoolkit/openvino.genai",
    ),
    "engine:openvino-lookup": Entry(
        "methods.engine_openvino:OpenVinoLookup",
        "OpenVINO GenAI's prompt lookup, which counts nothing.",
        peer=True,
        baseline="engine:openvino",
        source="github.com/openvinotoolkit/openvino.genai",
    ),
    "engine:llama.cpp": Entry(
        "methods.engine_llamacpp:LlamaCpp",
        "llama.cpp's plain decoding: the baseline of its other rows.",
        peer=True,
        baseline="engine:llama.cpp",
        source="github.com/abetlen/llama-cpp-python",
    ),
    "engine:llama.cpp-draft": Entry(
        "methods.engine_llamacpp:LlamaCppDraft",
        "llama.cpp's speculative decoding with a draft model, of constant length.",
        needs=("draft",),
        peer=True,
        baseline="engine:llama.cpp",
        source="github.com/abetlen/llama-cpp-python",
    ),
    "engine:llama.cpp-lookup": Entry(
        "methods.engine_llamacpp:LlamaCppLookup",
        "llama-cpp-python's prompt lookup.",
        peer=True,
        baseline="engine:llama.cpp",
        source="github.com/abetlen/llama-cpp-python",
    ),
    "engine:http-vanilla": Entry(
        "methods.engine_http:HttpVanilla",
        "A server that decodes plainly: the baseline of engine:http.",
        peer=True,
        baseline="engine:http-vanilla",
        source="any server with OpenAI's completions",
    ),
    "engine:http": Entry(
        "methods.engine_http:Http",
        "A server that decodes as it likes: vLLM, SGLang, llama.cpp, others with OpenAI's API.",
        peer=True,
        baseline="engine:http-vanilla",
        source="any server with OpenAI's completions",
    ),
}

_plugged_in: dict[str, Entry] = {}


def entries() -> dict[str, Entry]:
    """All methods by canonical name; ours first. A name of ours cannot be taken by another."""
    return {**METHODS, **_installed(), **_plugged_in}


@cache
def _installed() -> dict[str, Entry]:
    """Other distributions' methods; looked up once, as that reads every distribution's metadata."""
    import importlib.metadata

    found = {}
    for point in importlib.metadata.entry_points(group=GROUP):
        if point.name in METHODS:
            continue
        package = point.dist.name if point.dist else "an unknown distribution"
        found[point.name] = Entry(point.value, f"from {package}", guarantee="", origin=package)
    return found


def guard_neighbours() -> None:
    """Raise UsageError where another package hides one of ours."""
    home = Path(__file__).resolve().parents[1]
    for name in NEIGHBOURS:
        spec = importlib.util.find_spec(name)
        if spec is None:
            raise UsageError(
                f"specbench's package {name!r} is not installed", "pip install specbench-cli"
            )
        found = Path(next(iter(spec.submodule_search_locations or [str(spec.origin)])))
        if found.resolve() != home / name:
            raise UsageError(
                f"another package named {name!r} shadows specbench's: {found}",
                "run from another folder, or install specbench-cli in a venv of its own",
            )


def foreign() -> bool:
    """Whether code of a plug-in was imported here."""
    return bool(_plugged_in)


def resolve(name: str) -> str:
    """Canonical name of a method, given that or an alias. Raises UsageError if there is none."""
    known = entries()
    word = name.strip().lower()
    if word in known:
        return word
    aliases = {alias: canonical for canonical, entry in known.items() for alias in entry.aliases}
    if word in aliases:
        return aliases[word]
    guess = did_you_mean(word, [*known, *aliases])
    raise UsageError(
        f"there is no method {name!r}{guess or '; there are ' + ', '.join(known)}",
        "specbench list methods",
    )


def lossless() -> list[str]:
    """Our methods that promise vanilla's output, and are no peers."""
    return [name for name, each in METHODS.items() if each.guarantee == LOSSLESS and not each.peer]


def load(name: str) -> type[Method]:
    """Import a method's class.

    Raises:
        UsageError: no such method, or another distribution's does not import.
    """
    entry = entries()[resolve(name)]
    module, _, attribute = entry.target.partition(":")
    try:
        found: type[Method] = getattr(importlib.import_module(module), attribute)
    except Exception as fault:
        if entry.origin == "specbench":
            raise
        raise UsageError(
            f"method {name!r} of {entry.origin} does not import: {type(fault).__name__}: {fault}",
            f"pip install --upgrade {entry.origin}",
        ) from fault
    return found


def papers(name: str) -> Papers:
    """What is known of a method's papers: what its class says, else `methods/papers.yaml`.

    Raises:
        UsageError: as `load`.
    """
    known = _our_papers()
    if name in METHODS and name in known:  # said without importing the method, and so torch
        return known[name]
    method = load(name)
    if method.citation or method.claims:
        return Papers(inspect.cleandoc(method.citation), tuple(method.claims))
    names = (vars(kind).get("name") for kind in method.__mro__)  # its own, or whose it builds on
    return next((known[name] for name in names if name in known), Papers())


@cache
def _our_papers() -> dict[str, Papers]:
    """By the names of our methods."""
    import importlib.resources

    import yaml

    from specbench_cli.engine.params import Claim

    text = importlib.resources.files("methods").joinpath("papers.yaml").read_text(encoding="utf-8")
    every = yaml.safe_load(text)["papers"].values()
    found = {}
    for name in METHODS:
        own = [paper for paper in every if name in paper["of"]]
        cited = own + [paper for paper in every if name in paper.get("also", ())]
        claims = tuple(Claim(**claim) for paper in own for claim in paper.get("claims", ()))
        if cited:
            found[name] = Papers("\n\n".join(p["citation"].strip() for p in cited), claims)
    return found


def parameters(name: str, passed: Mapping[str, Any]) -> MethodParams:
    """A method's parameters: those passed, defaults for the rest.

    Raises:
        UsageError: an unknown parameter, or a value that is not allowed.
    """
    from pydantic import ValidationError

    method = load(name)
    known = list(method.Params.model_fields)
    try:
        return method.Params.model_validate(dict(passed))
    except ValidationError as found:
        raise usage_error(
            found,
            subject=lambda place: f"{name}.{'.'.join(map(str, place))}" if place else name,
            keys=lambda place: known,
            hint=f"specbench list methods {name}",
        ) from found


def build(name: str, passed: Mapping[str, Any]) -> Method:
    """A method with its parameters; raises what `load` and `parameters` raise."""
    return load(name)(parameters(name, passed))


def load_plugin(path: str) -> list[str]:
    """Register every method that a Python file defines.

    Returns:
        The names registered.

    Raises:
        UsageError: what `plugin.read` raises, or a name is taken.
    """
    from specbench_cli import plugin

    origin = Path(path).name
    found = plugin.read(path)
    for name, method in found.items():
        holder = entries().get(name)
        if holder and holder.origin != origin:
            raise UsageError(
                f"{path}: the name {name!r} is taken by {holder.origin}",
                f'give {method.__name__} another `name = "..."`',
            )
        _plugged_in[name] = _describe(method, origin)
    return list(found)


def _describe(method: type[Method], origin: str) -> Entry:
    """The entry of a class that is imported already."""
    return Entry(
        f"{method.__module__}:{method.__qualname__}",
        (method.__doc__ or "").strip().partition("\n")[0],
        needs=tuple(sorted(method.needs)),
        peer=method.peer,
        baseline=method.baseline,
        guarantee="",
        origin=origin,
    )

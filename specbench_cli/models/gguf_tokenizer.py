"""Conversion of a GGUF file's tokenizer to transformers' files.

There are two kinds: byte-level BPE ("gpt2": Llama 3, Qwen, SmolLM, Phi 2) and SentencePiece's BPE
("llama": Llama 2, Gemma, Phi 3). A GGUF file contains only the name of the pre-tokenization rule,
not the rule itself.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from typing import Any

from specbench_cli.errors import EnvironmentFault, UsageError

UNKNOWN, CONTROL, USER_DEFINED, UNUSED, BYTE = 2, 3, 4, 5, 6
"""Kinds of tokens other than normal ones (1)."""

_LLAMA3 = (
    r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}{1,3}| ?[^\s\p{L}\p{N}]+[\r\n]*"
    r"|\s*[\r\n]+|\s+(?!\S)|\s+"
)
_QWEN2 = _LLAMA3.replace(r"\p{N}{1,3}", r"\p{N}")
SPLITS = {
    "default": "gpt2", "gpt-2": "gpt2", "phi-2": "gpt2",
    "smollm": "digits", "starcoder": "digits", "refact": "digits",
    "llama-bpe": _LLAMA3, "llama3": _LLAMA3, "llama-v3": _LLAMA3, "dbrx": _LLAMA3,
    "smaug-bpe": _LLAMA3, "falcon3": _LLAMA3,
    "qwen2": _QWEN2, "deepseek-r1-qwen": _QWEN2, "megrez": _QWEN2,
}  # fmt: skip
"""Pre-tokenization rules by llama.cpp's name (`tokenizer.ggml.pre`): GPT-2's, GPT-2's with separate
digits, or a regular expression."""

SPACE = "\u2581"  # SentencePiece's symbol for a space


def tokenizer_files(file: str, facts: Mapping[str, Any]) -> dict[str, Any]:
    """Return the contents of tokenizer.json and tokenizer_config.json. The key is the file name.

    Args:
        file: name of the GGUF file for messages.
        facts: metadata of the file.

    Raises:
        UsageError: the kind of tokenizer or the pre-tokenization rule is not supported.
        EnvironmentFault: required metadata are missing.
    """
    metadata = {
        key.removeprefix("tokenizer.ggml."): value
        for key, value in facts.items()
        if key.startswith("tokenizer.ggml.")
    }
    kind = metadata.get("model")
    makers = {"gpt2": _make_byte_level, "llama": _make_sentence_piece}
    if kind not in makers:
        raise UsageError(
            f"{file} has a tokenizer of the kind {kind}, which cannot be read here (read: gpt2,"
            " llama)",
            "give transformers' folder of the model",
        )
    try:
        tokens: list[str] = metadata["tokens"]
        tokenizer = makers[kind](file, metadata)
    except KeyError as error:
        raise EnvironmentFault(
            f"{file} is damaged or incomplete: its metadata lack tokenizer.ggml.{error.args[0]}",
            "download it again",
        ) from error
    except UsageError:
        raise
    except Exception as error:  # the library rejects invalid tokens and merges
        raise EnvironmentFault(
            f"{file} is damaged: its metadata make no tokenizer, {error}", "download it again"
        ) from error
    kinds = metadata.get("token_type") or [1] * len(tokens)
    tokenizer.add_tokens(_make_added_tokens(tokens, kinds, {USER_DEFINED}, special=False))
    tokenizer.add_special_tokens(
        _make_added_tokens(tokens, kinds, {CONTROL, UNKNOWN}, special=True)
    )

    def get_token(name: str) -> str | None:
        at = metadata.get(f"{name}_token_id")
        return tokens[at] if at is not None and at < len(tokens) else None

    _add_bos_and_eos(tokenizer, metadata, get_token("bos"), get_token("eos"))
    config = {
        "tokenizer_class": "PreTrainedTokenizerFast",
        "bos_token": get_token("bos"),
        "eos_token": get_token("eos"),
        "unk_token": get_token("unknown"),
        "pad_token": get_token("padding"),
        "chat_template": facts.get("tokenizer.chat_template"),
        "clean_up_tokenization_spaces": False,
    }
    return {
        "tokenizer.json": json.loads(tokenizer.to_str()),
        "tokenizer_config.json": {key: value for key, value in config.items() if value is not None},
    }


def _make_byte_level(file: str, metadata: Mapping[str, Any]) -> Any:
    from tokenizers import Regex, Tokenizer, decoders, models, normalizers, pre_tokenizers

    pre = metadata.get("pre", "default")
    how = SPLITS.get(pre)
    if how is None:
        raise UsageError(
            f"{file} splits texts by the rule {pre}, which is not known here (known:"
            f" {', '.join(SPLITS)})",
            "give transformers' folder of the model",
        )
    merges = [tuple(merge.split(" ", 1)) for merge in metadata["merges"]]
    tokenizer = Tokenizer(
        models.BPE(
            vocab={token: at for at, token in enumerate(metadata["tokens"])},
            merges=merges,
            ignore_merges=how == _LLAMA3,
        )
    )
    if how in ("gpt2", "digits"):
        level = pre_tokenizers.ByteLevel(add_prefix_space=False)
        digits = pre_tokenizers.Digits(individual_digits=True)
        steps = [digits, level] if how == "digits" else [level]
    else:
        steps = [
            pre_tokenizers.Split(Regex(how), "isolated"),
            pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False),
        ]
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence(steps)
    if how == _QWEN2:
        tokenizer.normalizer = normalizers.NFC()
    tokenizer.decoder = decoders.ByteLevel()
    return tokenizer


def _make_sentence_piece(file: str, metadata: Mapping[str, Any]) -> Any:
    from tokenizers import Tokenizer, decoders, models, normalizers

    tokens, scores = metadata["tokens"], metadata["scores"]
    kinds = metadata.get("token_type") or [1] * len(tokens)
    unknown = metadata.get("unknown_token_id", 0)
    tokenizer = Tokenizer(
        models.BPE(
            vocab={token: at for at, token in enumerate(tokens)},
            merges=_merges(tokens, scores, kinds),
            unk_token=tokens[unknown],
            fuse_unk=True,
            byte_fallback=BYTE in kinds,
        )
    )
    prefix = metadata.get("add_space_prefix", True)
    replaced = normalizers.Replace(" ", SPACE)
    tokenizer.normalizer = (
        normalizers.Sequence([normalizers.Prepend(SPACE), replaced]) if prefix else replaced
    )
    steps = [decoders.Replace(SPACE, " "), decoders.ByteFallback(), decoders.Fuse()]
    tokenizer.decoder = decoders.Sequence([*steps, decoders.Strip(" ", 1, 0)] if prefix else steps)
    return tokenizer


def _merges(
    tokens: Sequence[str], scores: Sequence[float], kinds: Sequence[int]
) -> list[tuple[str, str]]:
    """Return the BPE merges that are equivalent to SentencePiece's pieces and scores, best first.

    SentencePiece joins the two neighbours whose combined piece has the best score (Kudo and
    Richardson, arXiv:1808.06226).
    """
    rank = {
        token: at
        for at, (token, kind) in enumerate(zip(tokens, kinds, strict=True))
        if kind not in (UNKNOWN, CONTROL, BYTE, UNUSED)
    }
    found = [
        (-scores[at], rank[token[:cut]], rank[token[cut:]], token[:cut], token[cut:])
        for token, at in rank.items()
        if kinds[at] != USER_DEFINED
        for cut in range(1, len(token))
        if token[:cut] in rank and token[cut:] in rank
    ]
    return [(left, right) for _, _, _, left, right in sorted(found)]


def _make_added_tokens(
    tokens: Sequence[str], kinds: Sequence[int], wanted: set[int], *, special: bool
) -> list[Any]:
    from tokenizers import AddedToken

    return [
        AddedToken(token, special=special, normalized=False)
        for token, kind in zip(tokens, kinds, strict=True)
        if kind in wanted
    ]


def _add_bos_and_eos(
    tokenizer: Any, metadata: Mapping[str, Any], bos: str | None, eos: str | None
) -> None:
    """Configure the tokenizer to add BOS and EOS tokens, as the metadata require."""
    from tokenizers import processors

    usual = metadata["model"] == "llama" or SPLITS.get(metadata.get("pre", "")) == _LLAMA3
    first = bos if metadata.get("add_bos_token", usual) else None
    last = eos if metadata.get("add_eos_token", False) else None
    if first or last:
        pair = [("bos", first), ("eos", last)]
        text = " ".join(token for token in (first, "$A", last) if token)
        tokenizer.post_processor = processors.TemplateProcessing(
            single=text,
            special_tokens=[
                (token, int(metadata[f"{which}_token_id"])) for which, token in pair if token
            ],
        )

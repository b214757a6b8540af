"""The tokenizer that a GGUF file's metadata describes, as the files that Hugging Face tokenizers read.

A byte-level vocabulary ("gpt2") is rebuilt here from tokens, merges and the name of its pre-tokenizer, because text
must be cut exactly as it was when the merges were learned: a split rule we do not know is refused rather than guessed.
A SentencePiece vocabulary ("llama") has one rule only and goes through transformers' own conversion.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final

from w4a4.configs.errors import CheckpointError, UnsupportedError

if TYPE_CHECKING:
    from tokenizers import Tokenizer

_CONTROL, _USER_DEFINED = 3, 4  # values of tokenizer.ggml.token_type
_LLAMA3_SPLIT: Final = (
    r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}{1,3}"
    r"| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
)
_QWEN2_SPLIT: Final = _LLAMA3_SPLIT.replace(r"\p{N}{1,3}", r"\p{N}")
_SPLITS: Final = {  # value of tokenizer.ggml.pre -> how text is cut before merging
    "llama-bpe": _LLAMA3_SPLIT,
    "llama3": _LLAMA3_SPLIT,
    "llama-v3": _LLAMA3_SPLIT,
    "qwen2": _QWEN2_SPLIT,
    "deepseek-r1-qwen": _QWEN2_SPLIT,
    "smollm": "digits",
    "gpt-2": "bytes",
    "default": "bytes",
}
_END_TOKENS: Final = ("<|im_end|>", "<|endoftext|>", "<|eot_id|>", "<|eom_id|>", "<|end_of_text|>", "</s>")


def write_tokenizer(metadata: Mapping[str, Any], gguf_file: Path, folder: Path) -> None:
    """Write `tokenizer.json`, `tokenizer_config.json` (with chat template) and `generation_config.json` to `folder`.

    Raises:
        UnsupportedError: a kind of vocabulary or a split rule that is not known.
        CheckpointError: the metadata lacks or contradicts what it needs.
    """
    kind = metadata.get("tokenizer.ggml.model")
    if kind == "gpt2":
        _write_byte_level(metadata, gguf_file.name, folder)
    elif kind == "llama":
        from transformers import AutoTokenizer

        try:
            tokenizer = AutoTokenizer.from_pretrained(
                str(gguf_file.parent), gguf_file=gguf_file.name, local_files_only=True
            )
        except Exception as error:  # transformers raises what it stumbles over
            raise CheckpointError(f"{gguf_file.name}: the tokenizer cannot be read: {error}") from error
        tokenizer.save_pretrained(str(folder))
    else:
        raise UnsupportedError(
            f"{gguf_file.name}: vocabulary of type {kind!r}, supported: gpt2, llama", "name the model's folder instead"
        )
    document = {
        "bos_token_id": metadata.get("tokenizer.ggml.bos_token_id"),
        "eos_token_id": end_token_ids(metadata),
        "pad_token_id": metadata.get("tokenizer.ggml.padding_token_id"),
    }
    kept = {key: value for key, value in document.items() if value not in (None, [])}
    (folder / "generation_config.json").write_text(json.dumps(kept, indent=2) + "\n", encoding="utf-8")


def end_token_ids(metadata: Mapping[str, Any]) -> list[int]:
    """Tokens that end a generation: those the file names, then control tokens that are known to end turns or text."""
    named = [metadata.get(f"tokenizer.ggml.{key}_token_id") for key in ("eos", "eot", "eom")]
    types = metadata.get("tokenizer.ggml.token_type") or ()
    known = [
        index
        for index, token in enumerate(metadata.get("tokenizer.ggml.tokens") or ())
        if token in _END_TOKENS and index < len(types) and types[index] == _CONTROL
    ]
    return list(dict.fromkeys(token for token in (*named, *known) if isinstance(token, int)))


def _write_byte_level(metadata: Mapping[str, Any], name: str, folder: Path) -> None:
    tokens = metadata.get("tokenizer.ggml.tokens")
    if not tokens:
        raise CheckpointError(f"{name}: no vocabulary in the metadata (tokenizer.ggml.tokens)")
    backend = _byte_level_tokenizer(metadata, name)
    backend.save(str(folder / "tokenizer.json"))
    config: dict[str, Any] = {
        "tokenizer_class": "PreTrainedTokenizerFast",
        "add_bos_token": bool(metadata.get("tokenizer.ggml.add_bos_token", False)),
        "clean_up_tokenization_spaces": False,
        "model_max_length": metadata.get(f"{metadata['general.architecture']}.context_length", 2048),
    }
    for role, key in (("bos", "bos"), ("eos", "eos"), ("unk", "unknown"), ("pad", "padding")):
        token_id = metadata.get(f"tokenizer.ggml.{key}_token_id")
        if token_id is not None:
            if not 0 <= token_id < len(tokens):
                raise CheckpointError(f"{name}: {key}_token_id {token_id} is outside the vocabulary of {len(tokens)}")
            config[f"{role}_token"] = tokens[token_id]
    template = metadata.get("tokenizer.chat_template")
    if template:
        (folder / "chat_template.jinja").write_text(template, encoding="utf-8")
    (folder / "tokenizer_config.json").write_text(json.dumps(config, indent=2) + "\n", encoding="utf-8")


def _byte_level_tokenizer(metadata: Mapping[str, Any], name: str) -> Tokenizer:
    from tokenizers import AddedToken, Regex, Tokenizer, decoders, normalizers, pre_tokenizers, processors
    from tokenizers.models import BPE

    rule = metadata.get("tokenizer.ggml.pre", "default")
    if rule not in _SPLITS:
        raise UnsupportedError(
            f"{name}: text splitting rule {rule!r} is not known, supported: {', '.join(_SPLITS)}",
            "name the model's folder instead: its tokenizer.json says how to split",
        )
    tokens: list[str] = metadata["tokenizer.ggml.tokens"]
    merges = [tuple(merge.split(" ", 1)) for merge in metadata.get("tokenizer.ggml.merges", ())]
    vocabulary = {token: index for index, token in enumerate(tokens)}
    if len(vocabulary) != len(tokens):
        raise CheckpointError(f"{name}: the vocabulary repeats {len(tokens) - len(vocabulary)} tokens")
    try:
        tokenizer = Tokenizer(BPE(vocab=vocabulary, merges=merges, ignore_merges=_SPLITS[rule] is _LLAMA3_SPLIT))
    except Exception as error:  # the Rust library raises plain Exception
        raise CheckpointError(f"{name}: the merges do not fit the vocabulary: {error}") from error
    split = _SPLITS[rule]
    if split == "bytes":
        tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    elif split == "digits":
        tokenizer.pre_tokenizer = pre_tokenizers.Sequence(
            [pre_tokenizers.Digits(individual_digits=True), pre_tokenizers.ByteLevel(add_prefix_space=False)]
        )
    else:
        tokenizer.pre_tokenizer = pre_tokenizers.Sequence(
            [
                pre_tokenizers.Split(Regex(split), behavior="isolated"),
                pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False),
            ]
        )
    if split is _QWEN2_SPLIT:
        tokenizer.normalizer = normalizers.NFC()
    tokenizer.decoder = decoders.ByteLevel()
    types = metadata.get("tokenizer.ggml.token_type") or ()
    # In a byte-level vocabulary every learned token is spelled with visible characters; control tokens are text.
    for token, kind in zip(tokens, types, strict=False):
        if kind == _CONTROL:
            tokenizer.add_special_tokens([AddedToken(token, normalized=False, special=True)])
        elif kind == _USER_DEFINED:
            tokenizer.add_tokens([AddedToken(token, normalized=False, special=False)])
    begin = metadata.get("tokenizer.ggml.bos_token_id")
    if metadata.get("tokenizer.ggml.add_bos_token") and begin is not None:
        tokenizer.post_processor = processors.TemplateProcessing(
            single=f"{tokens[begin]} $A", special_tokens=[(tokens[begin], begin)]
        )
    else:
        tokenizer.post_processor = processors.ByteLevel(trim_offsets=False)
    return tokenizer

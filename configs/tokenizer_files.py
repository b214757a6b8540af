"""The tokenizer of a model folder, source or checkpoint: from its files alone, with every fault told in one line."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Final

from w4a4.configs.errors import CheckpointError, NotFoundError
from w4a4.configs.json_file import read_json_object

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

VOCABULARIES: Final = ("tokenizer.json", "tokenizer.model", "vocab.json")  # one of them holds the tokens
_JSON_FILES: Final = ("tokenizer.json", "tokenizer_config.json", "special_tokens_map.json", "vocab.json")


def load_tokenizer(folder: Path, vocab_size: int) -> PreTrainedTokenizerBase:
    """The tokenizer whose files stand in `folder`; never runs code from it, never asks the network.

    Args:
        vocab_size: of the model. Its tokenizer may have fewer tokens (padded embeddings), but not less than half;
            only tokens that were added to the vocabulary may lie beyond it.

    Raises:
        NotFoundError: the folder holds no tokenizer.
        CheckpointError: its files cannot be read, or are those of another model.
    """
    if not any((folder / file).is_file() for file in VOCABULARIES):
        raise NotFoundError(
            f"{folder} holds no tokenizer ({', '.join(VOCABULARIES[:-1])} or {VOCABULARIES[-1]})",
            "copy the tokenizer files of the model into that folder",
        )
    for file in _JSON_FILES:
        if (folder / file).is_file():
            read_json_object(folder / file)
    from transformers import AutoTokenizer

    try:
        tokenizer: PreTrainedTokenizerBase = AutoTokenizer.from_pretrained(
            str(folder), local_files_only=True, trust_remote_code=False
        )
    except Exception as error:  # transformers, tokenizers and json each raise their own kinds, some in many lines
        raise CheckpointError(
            f"{folder}: the tokenizer cannot be read: {type(error).__name__}: {_first_line(error)}",
            "fetch or copy the tokenizer files of the model again",
        ) from error
    if not tokenizer.is_fast:
        raise CheckpointError(
            f"{folder}: its {type(tokenizer).__name__} has no fast form, which is needed",
            "save it with a tokenizer.json",
        )
    _check_size(tokenizer, vocab_size, folder)
    return tokenizer


def _check_size(tokenizer: PreTrainedTokenizerBase, vocab_size: int, folder: Path) -> None:
    ids = set(tokenizer.get_vocab().values())
    highest = max(ids - set(tokenizer.added_tokens_decoder), default=-1)
    if highest >= vocab_size or len(ids) < vocab_size // 2:
        got = f"token ids up to {highest}" if highest >= vocab_size else f"{len(ids)} tokens"
        raise CheckpointError(
            f"{folder}: the tokenizer has {got}, expected one for the model's vocabulary of {vocab_size}",
            "copy the tokenizer files of this very model into that folder",
        )


def _first_line(error: Exception) -> str:
    return next((line.strip() for line in str(error).splitlines() if line.strip()), "no reason given")[:300]

"""Text to token ids and back, and a chat to a prompt: the checkpoint's own tokenizer behind what the server needs.

Strings that cannot be encoded as UTF-8 (lone surrogates) are refused here: Rust would panic on them.
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from functools import lru_cache
from pathlib import Path
from typing import TYPE_CHECKING, Any

from w4a4.configs import tokenizer_files
from w4a4.configs.errors import UsageError
from w4a4.configs.generation_config import read_generation_config

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

SPACE = "\u2581"  # sentencepiece's mark of a space
_BYTE_TOKEN = re.compile("<0x([0-9A-Fa-f]{2})>")


class ChatTemplateError(ValueError):
    """The checkpoint has no chat template, or it refuses the messages."""


@lru_cache(maxsize=1)
def _byte_of_letter() -> dict[str, int]:
    """GPT-2's table: which byte each letter of a byte-level token stands for."""
    printable = [*range(ord("!"), ord("~") + 1), *range(ord("¡"), ord("¬") + 1), *range(ord("®"), ord("ÿ") + 1)]
    others = [byte for byte in range(256) if byte not in printable]
    return {chr(byte): byte for byte in printable} | {chr(256 + index): byte for index, byte in enumerate(others)}


class Tokenizer:
    """A checkpoint's tokenizer. Safe to call from several threads: nothing here changes its state.

    `eos_ids` are all tokens that end an answer: the tokenizer's own and those given.
    """

    def __init__(
        self,
        tokenizer: PreTrainedTokenizerBase,
        *,
        chat_template: str | None = None,
        eos_ids: frozenset[int] = frozenset(),
    ) -> None:
        self.hf = tokenizer
        self._backend = tokenizer.backend_tokenizer
        self._chat_template = chat_template
        self.eos_ids = eos_ids | ({int(tokenizer.eos_token_id)} if tokenizer.eos_token_id is not None else set())
        self._special_ids = frozenset(tokenizer.all_special_ids)
        self._token_bytes = lru_cache(maxsize=8192)(self._make_token_bytes)
        vocabulary = tokenizer.get_vocab()
        self._longest_token = max(map(len, vocabulary), default=1)
        self._is_byte_level = "Ġ" in vocabulary or any("Ġ" in token for token in list(vocabulary)[:20000])

    @property
    def bos_id(self) -> int | None:
        token_id: int | None = self.hf.bos_token_id
        return token_id

    def least_num_tokens(self, text: str) -> int:
        """Tokens that a text has at least, without encoding it; a normaliser may shorten it fourfold."""
        return len(text) // (4 * self._longest_token)

    def encode(self, text: str, *, add_special_tokens: bool = True) -> list[int]:
        """Token ids of a text. Raises ValueError for text with lone surrogates."""
        try:
            text.encode()
        except UnicodeEncodeError as error:
            raise ValueError(f"the text holds a lone surrogate at character {error.start}, which is no text") from None
        ids: list[int] = self._backend.encode(text, add_special_tokens=add_special_tokens).ids
        return ids

    def decode(self, ids: list[int], skip_special_tokens: bool = False) -> str:
        text: str = self._backend.decode(ids, skip_special_tokens=skip_special_tokens)
        return text

    def token_bytes(self, token_id: int) -> bytes:
        """The bytes that one token stands for; empty for ids beyond the vocabulary (padded embeddings)."""
        return self._token_bytes(token_id)

    def token_text(self, token_id: int) -> str:
        """One token as text. Bytes that are no UTF-8 by themselves read `bytes:\\xe6\\x97`, as at OpenAI, so that
        different tokens stay different."""
        data = self.token_bytes(token_id)
        try:
            return data.decode()
        except UnicodeDecodeError:
            return "bytes:" + "".join(f"\\x{byte:02x}" for byte in data)

    def render_chat(self, messages: Sequence[Mapping[str, Any]], options: Mapping[str, Any]) -> str:
        """The prompt for a chat; `options` are what the template may ask for, whatever their names.

        Raises ChatTemplateError. Special tokens are in the text already.
        """
        if self._chat_template is None and not self.hf.chat_template:
            raise ChatTemplateError(
                "this checkpoint has no chat template: use /v1/completions, or start with --chat-template"
            )
        try:
            text = self.hf.apply_chat_template(
                [dict(message) for message in messages], chat_template=self._chat_template, tokenize=False, **options
            )
        except Exception as error:  # a template is a program: it may raise anything
            raise ChatTemplateError(f"the chat template refuses these messages: {error}") from None
        return str(text)

    def _make_token_bytes(self, token_id: int) -> bytes:
        token: str | None = self._backend.id_to_token(token_id)
        if token is None:
            return b""
        if token_id in self._special_ids or token in self.hf.get_added_vocab():
            return token.encode()
        if byte := _BYTE_TOKEN.fullmatch(token):
            return bytes.fromhex(byte[1])
        if self._is_byte_level:
            table = _byte_of_letter()
            return b"".join(bytes([table[letter]]) if letter in table else letter.encode() for letter in token)
        return token.replace(SPACE, " ").encode()


def load_tokenizer(folder: Path, vocab_size: int, *, chat_template: Path | None = None) -> Tokenizer:
    """The tokenizer of a checkpoint folder whose model has `vocab_size` tokens.

    Raises NotFoundError (there is none), CheckpointError, or UsageError (the template).
    """
    template = None
    if chat_template is not None:
        try:
            template = chat_template.read_text(encoding="utf-8")
        except (OSError, UnicodeDecodeError) as error:
            raise UsageError(f"--chat-template {chat_template}: {error}", hint="name a Jinja file") from None
    eos_ids = read_generation_config(folder).eos_ids
    return Tokenizer(tokenizer_files.load_tokenizer(folder, vocab_size), chat_template=template, eos_ids=eos_ids)

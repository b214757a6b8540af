"""Answers that follow a JSON schema or are any JSON: xgrammar behind two small classes. The `structured` extra.

A compiled grammar is shared and cached; each request gets a state of its own that walks along with its tokens.
"""

from __future__ import annotations

import json
from typing import TYPE_CHECKING, Any

from w4a4.configs.errors import UsageError

if TYPE_CHECKING:
    import xgrammar
    from torch import Tensor
    from transformers import PreTrainedTokenizerBase

MAX_SCHEMA = 65536  # characters; compiling takes seconds to minutes at this size


class GrammarState:
    """Where one answer stands in its grammar. The engine's thread alone calls it, a token at a time."""

    def __init__(self, compiled: xgrammar.CompiledGrammar, vocab_size: int) -> None:
        import xgrammar

        self._matcher = xgrammar.GrammarMatcher(compiled)
        self._mask = xgrammar.allocate_token_bitmask(1, vocab_size)  # int32 [1, V / 32]

    def mask(self, logits: Tensor) -> None:
        """Set the logits [V] of every token that the grammar does not allow next to -inf, in place."""
        import xgrammar

        if self._matcher.fill_next_token_bitmask(self._mask):
            xgrammar.apply_token_bitmask_inplace(logits.unsqueeze(0), self._mask.to(logits.device))

    def accept(self, token: int) -> bool:
        """Walk on by one token; False if the grammar does not allow it."""
        return bool(self._matcher.accept_token(token))

    @property
    def is_done(self) -> bool:
        """Nothing may follow any more."""
        return bool(self._matcher.is_terminated())


class GrammarCompiler:
    """Compiles grammars for one tokenizer. Slow (up to seconds for large schemas), safe to call from another thread."""

    def __init__(self, tokenizer: PreTrainedTokenizerBase, vocab_size: int, stop_ids: frozenset[int]) -> None:
        try:
            import xgrammar
        except ImportError:
            raise UsageError(
                "response_format needs xgrammar, which is not installed", hint="pip install 'w4a4[structured]'"
            ) from None
        self._vocab_size = vocab_size
        info = xgrammar.TokenizerInfo.from_huggingface(
            tokenizer, vocab_size=vocab_size, stop_token_ids=sorted(stop_ids) or None
        )
        self._compiler = xgrammar.GrammarCompiler(info, max_threads=1, cache_limit_bytes=64 * 2**20)

    def compile_json(self) -> GrammarState:
        """Any JSON object."""
        return self.compile_schema({"type": "object"})

    def compile_schema(self, schema: dict[str, Any]) -> GrammarState:
        """JSON that fits a JSON schema. Raises ValueError if the schema is not one that can be compiled."""
        text = json.dumps(schema)
        if len(text) > MAX_SCHEMA:
            raise ValueError(f"response_format: the JSON schema has {len(text)} characters, expected <= {MAX_SCHEMA}")
        try:
            compiled = self._compiler.compile_json_schema(text)
        except Exception as error:  # xgrammar raises bare RuntimeErrors from C++
            raise ValueError(f"response_format: the JSON schema cannot be compiled: {error}") from None
        return GrammarState(compiled, self._vocab_size)

"""From tokens to text, as they come: incremental decoding and stop strings.

One token is not one piece of text: characters span tokens, and tokenizers decode a token differently depending on its
neighbours. So a short window of recent tokens is decoded again each time and only what grew is handed out. Text that
could still turn into a stop string is held back until it cannot.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

REPLACEMENT = "\ufffd"
MAX_HELD = 3  # U+FFFD at the end of a text may be the first bytes of a character, of which there are at most three
CONTEXT = 5  # tokens of the prompt that the first token of the answer is decoded with
LONGEST_WINDOW = 64
WINDOW = 12  # tokens decoded again at most, before the window moves on

Decode = Callable[[Sequence[int]], str]


class StopStrings:
    """Watches a growing text for the first of several strings, wherever the pieces are cut."""

    def __init__(self, strings: Sequence[str]) -> None:
        self._strings = tuple(strings)
        self._held = ""

    def push(self, text: str, *, is_last: bool = False) -> tuple[str, str | None, str]:
        """Add text. Returns what may be shown, the stop string if one was met, and the stop string's own text.

        With several matches the one that ends first wins, then the longest: what the model would have met first.
        """
        held = self._held + text
        match: tuple[int, int, str] | None = None
        for string in self._strings:
            start = held.find(string)
            if start >= 0 and (match is None or (start + len(string), start) < match[:2]):
                match = (start + len(string), start, string)
        if match is not None:
            self._held = ""
            return held[: match[1]], match[2], match[2]
        num_held = 0 if is_last else self._num_possible(held)
        self._held = held[len(held) - num_held :]
        return held[: len(held) - num_held], None, ""

    def _num_possible(self, text: str) -> int:
        """Length of the longest end of the text that begins a stop string."""
        longest = 0
        for string in self._strings:
            for length in range(min(len(string) - 1, len(text)), longest, -1):
                if text.endswith(string[:length]):
                    longest = length
                    break
        return longest


class Detokenizer:
    """The text of one answer.

    `decode` maps token ids to text; special tokens are already left out of it if the request wants that. The end of the
    prompt is the context of the first token, which may otherwise lose its leading space. Stop strings count only once
    the answer has `min_tokens` tokens.
    """

    def __init__(
        self,
        decode: Decode,
        prompt_ids: Sequence[int] = (),
        stop: Sequence[str] = (),
        *,
        include_stop: bool = False,
        min_tokens: int = 0,
    ) -> None:
        self._decode = decode
        self._window = list(prompt_ids[-CONTEXT:])
        # Text of the window that has been handed out; a character cut in half by the prompt's end has not.
        self._shown = _complete(decode(self._window)) if self._window else ""
        self._stops = StopStrings(stop) if stop else None
        self._include_stop = include_stop
        self._min_tokens = min_tokens
        self._num_tokens = 0
        self.stop_reason: str | None = None

    def push(self, token: int | None, *, is_last: bool = False) -> str:
        """Add a token (None: no more text, as for an EOS) and return the text that may be shown now.

        After the call `stop_reason` is the stop string that was met, if any; nothing may be pushed after that.
        """
        text = ""
        if token is not None:
            self._window.append(token)
            self._num_tokens += 1
        if token is not None or is_last:
            text = self._grown(is_last)
        if self._stops is None or self._num_tokens < self._min_tokens:
            return text
        shown, self.stop_reason, matched = self._stops.push(text, is_last=is_last)
        return shown + matched if self._include_stop else shown

    def _grown(self, is_last: bool) -> str:
        decoded = self._decode(self._window)
        text = decoded if is_last else _complete(decoded)
        grown = text[len(self._shown) :]
        if grown:
            self._shown = text
        num_held = len(decoded) - len(text)
        if len(self._window) >= (LONGEST_WINDOW if num_held else WINDOW):
            # Some context must stay: many tokenizers drop a leading space at the start of a text. Where characters are
            # held, all their tokens must, so the window moves on only in an endless run of them.
            self._window = self._window[-2 * WINDOW if num_held else -WINDOW // 2 :]
            rest = self._decode(self._window)
            self._shown = rest[: len(rest) - num_held]
        return grown


def _complete(text: str) -> str:
    """The text without what may be an incomplete character at its end."""
    if not text.endswith(REPLACEMENT):
        return text
    end = len(text)
    while end > 0 and len(text) - end < MAX_HELD and text[end - 1] == REPLACEMENT:
        end -= 1
    return text[:end]

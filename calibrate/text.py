"""Text to calibrate on and to be scored on, and the tokens cut from it.

Text is named (`wikitext2`, `wikitext2-bundled`, `python-stdlib`) or lies in a local .txt, .jsonl or .parquet file.
What is returned is a string that also says where it came from, because WikiText-2 may come from a cache or from this
package. Tokens are cut by the usual rules: disjoint random windows to calibrate, consecutive windows to score.
"""

from __future__ import annotations

import hashlib
import json
import random
from collections.abc import Sequence
from difflib import get_close_matches
from pathlib import Path
from typing import Any, Protocol

import torch
from torch import Tensor

from w4a4.calibrate.bundled_text import python_stdlib
from w4a4.calibrate.wikitext import SPLITS, bundled_rows, wikitext2_rows
from w4a4.configs.errors import NotFoundError, UsageError

NAMES = ("wikitext2", "wikitext2-bundled", "python-stdlib")
SUFFIXES = (".txt", ".jsonl", ".parquet")


class Text(str):
    """A string that knows its `name`, its `split_name` and its `origin` (one phrase for people)."""

    name: str
    split_name: str
    origin: str

    @classmethod
    def of(cls, content: str, name: str, split_name: str, origin: str) -> Text:
        text = cls(content)
        text.name, text.split_name, text.origin = name, split_name, origin
        return text

    @property
    def sha256(self) -> str:
        """SHA-256 of the UTF-8 bytes, hexadecimal."""
        return hashlib.sha256(self.encode()).hexdigest()


class Tokenizer(Protocol):
    """The one method needed of a tokenizer; every `PreTrainedTokenizerBase` has it."""

    def encode(self, text: str, /, **options: Any) -> Sequence[int]: ...


def load_text(name_or_path: str | Path, split: str, *, column: str = "text", offline: bool = False) -> Text:
    """Text by name or from a local file.

    Args:
        name_or_path: one of `NAMES`, or a .txt file (used whole), a .jsonl or .parquet file (its rows joined by blank
            lines, as is usual for WikiText-2).
        split: "train", "validation" or "test"; a local file has no splits and is used whole whatever is asked.
        column: the key or column of .jsonl and .parquet rows that holds the text.
        offline: take no look at the hub.

    Raises:
        NotFoundError: no such name or file.
        UsageError: unknown split, a file that cannot be read, a missing column, or no text in it.
    """
    if split not in SPLITS:
        raise UsageError(f"unknown split {split!r}, expected one of {', '.join(SPLITS)}")
    name = str(name_or_path)
    if name == "wikitext2":
        rows, origin = wikitext2_rows(split, offline=offline)
    elif name == "wikitext2-bundled":
        rows, origin = bundled_rows(split)
    elif name == "python-stdlib":
        rows, origin = [python_stdlib(split)], "bundled, modules of Python 3.11.7"
    else:
        path = _local_file(name)
        rows, origin = _file_rows(path, column), f"file {path.name}"
    content = "\n\n".join(rows)
    if not content.strip():
        raise UsageError(f"{name} holds no text", "give a file with text in it")
    return Text.of(content, name, split, origin)


def calibration_tokens(tokenizer: Tokenizer, text: str, samples: int, seq: int, seed: int) -> Tensor:
    """Random windows of the tokenised text -> int64 [samples, seq], the same for the same arguments.

    The windows are disjoint when the text is long enough for that; otherwise their starts are drawn independently, as
    in GPTQ, and windows overlap.

    Raises:
        UsageError: the text is empty or shorter than one window, or `samples` or `seq` is too small.
    """
    if samples < 1:
        raise UsageError(f"samples must be at least 1, got {samples}")
    tokens = _encode(tokenizer, text, seq)
    generator = random.Random(seed)
    slack = len(tokens) - samples * seq
    if slack >= 0:
        gaps = sorted(generator.randrange(slack + 1) for _ in range(samples))
        starts = [gap + index * seq for index, gap in enumerate(gaps)]
        generator.shuffle(starts)
    else:
        starts = [generator.randrange(len(tokens) - seq + 1) for _ in range(samples)]
    return torch.stack([tokens[start : start + seq] for start in starts])


def windows(tokenizer: Tokenizer, text: str, seq: int, max_tokens: int | None = None) -> Tensor:
    """The first `max_tokens` tokens (all if None) cut into consecutive windows -> int64 [n, seq].

    The usual rule of perplexity tables: special tokens only where the tokenizer puts them at the start of the text, no
    overlap, the incomplete last window dropped. A window of seq tokens scores seq - 1.

    Raises:
        UsageError: the text is empty, or it or `max_tokens` is shorter than one window.
    """
    if max_tokens is not None and max_tokens < seq:
        raise UsageError(
            f"max_tokens is {max_tokens}, shorter than one window of {seq}", "lower --seq or raise the limit"
        )
    tokens = _encode(tokenizer, text, seq)[:max_tokens]
    count = len(tokens) // seq
    return tokens[: count * seq].view(count, seq)


def token_hash(tokens: Tensor) -> str:
    """SHA-256 (hexadecimal) of tokens as little-endian int32 in row-major order, preceded by their shape."""
    shape = "x".join(str(size) for size in tokens.shape)
    data = tokens.to(torch.int32).cpu().contiguous().numpy().astype("<i4").tobytes()
    return hashlib.sha256(shape.encode() + b"\n" + data).hexdigest()


def _encode(tokenizer: Tokenizer, text: str, seq: int) -> Tensor:
    if seq < 2:
        raise UsageError(f"seq must be at least 2, got {seq}")
    if not text.strip():
        raise UsageError("the text is empty")
    tokens = torch.tensor(list(tokenizer.encode(text, verbose=False)), dtype=torch.int64)
    if len(tokens) < seq:
        raise UsageError(
            f"the text has {len(tokens)} tokens, fewer than one window of {seq}", "lower --seq or give a longer text"
        )
    return tokens


def _local_file(name: str) -> Path:
    path = Path(name).expanduser()
    if path.suffix not in SUFFIXES:
        near = get_close_matches(name, NAMES, n=1)
        hint = f"did you mean {near[0]}?" if near else f"known texts: {', '.join(NAMES)}; files: {', '.join(SUFFIXES)}"
        raise NotFoundError(f"no text named {name!r}, and it is not a {', '.join(SUFFIXES)} file", hint)
    if not path.is_file():
        raise NotFoundError(f"no such file: {name}", f"known texts: {', '.join(NAMES)}")
    return path


def _file_rows(path: Path, column: str) -> list[str]:
    readers = {".txt": _txt_rows, ".jsonl": _jsonl_rows, ".parquet": _parquet_rows}
    try:
        return readers[path.suffix](path, column)
    except (OSError, UnicodeDecodeError) as error:
        raise UsageError(f"cannot read {path}: {error}", "give a readable UTF-8 file") from error


def _txt_rows(path: Path, column: str) -> list[str]:
    return [path.read_text(encoding="utf-8")]


def _jsonl_rows(path: Path, column: str) -> list[str]:
    rows = []
    with path.open(encoding="utf-8") as lines:
        for number, line in enumerate(lines, 1):
            if not line.strip():
                continue
            try:
                row = json.loads(line)
            except (ValueError, RecursionError) as error:
                raise UsageError(f"{path}, line {number} is not JSON: {error}") from error
            value = row.get(column) if isinstance(row, dict) else None
            if not isinstance(value, str):
                have = ", ".join(map(str, row)) if isinstance(row, dict) else type(row).__name__
                raise UsageError(f"{path}, line {number} has no text in column {column!r}; it has {have}")
            rows.append(value)
    return rows


def _parquet_rows(path: Path, column: str) -> list[str]:
    import pyarrow
    import pyarrow.parquet

    try:
        schema = pyarrow.parquet.read_schema(path)
        if column not in schema.names:
            raise UsageError(f"{path} has no column {column!r}; it has {', '.join(schema.names)}")
        values = pyarrow.parquet.read_table(path, columns=[column])[column].to_pylist()
    except pyarrow.ArrowException as error:
        raise UsageError(f"{path} is not a readable parquet file: {error}") from error
    if not all(isinstance(value, str) for value in values):
        raise UsageError(f"column {column!r} of {path} holds {schema.field(column).type}, expected text without nulls")
    return [str(value) for value in values]

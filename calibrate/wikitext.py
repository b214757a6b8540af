"""WikiText-2 (raw) as the Hugging Face hub's rows, wherever they can be had without waiting.

Looked for in this order: the hub cache, the datasets cache, the hub itself if it answers at once, the text bundled
with this package. Every origin has all of test and validation; for train the bundled text is the first 9 % only.
"""

from __future__ import annotations

import os
from pathlib import Path

from w4a4.calibrate.bundled_text import unpacked
from w4a4.calibrate.fetch import hub_is_reachable

REPOSITORY = "Salesforce/wikitext"
CONFIGURATION = "wikitext-2-raw-v1"
SPLITS = ("train", "validation", "test")

# split -> (file, SHA-256 of the unpacked bytes, what to say about it)
_BUNDLED = {
    "train": (
        "train-head.raw.xz",
        "a6882965084fbdc6a4fdd9f961bf1f376130bea1b06cbd4879340c4c5c4643ef",
        "bundled, the first 9 % of train",
    ),
    "validation": (
        "validation.raw.xz",
        "4cd0f6876d07a413aa911261ff6d363c72d757d47f0fdd6015702014c89cb9c7",
        "bundled, complete",
    ),
    "test": (
        "test.raw.xz",
        "173c87a53759e0201f33e0ccf978e510c2042d7f2cb78229d9a50d79b9e7dd08",
        "bundled, complete",
    ),
}


def wikitext2_rows(split: str, *, offline: bool) -> tuple[list[str], str]:
    """The rows of one split and where they came from; with `offline` the network is not touched."""
    path = _hub_file(split, local_files_only=True)
    if path is not None:
        return _parquet_rows(path), f"hub cache of {REPOSITORY}"
    cached = _datasets_cache_rows(split)
    if cached is not None:
        return cached, f"datasets cache of {REPOSITORY}"
    if not offline and hub_is_reachable():
        path = _hub_file(split, local_files_only=False)
        if path is not None:
            return _parquet_rows(path), f"hub, {REPOSITORY}"
    return bundled_rows(split)


def bundled_rows(split: str) -> tuple[list[str], str]:
    """The rows of one split from this package's own data, checked against their SHA-256."""
    name, expected, origin = _BUNDLED[split]
    lines = unpacked("wikitext2", name, expected).split("\n")[:-1]
    return ["" if not line.strip() else line + "\n" for line in lines], origin


def _hub_file(split: str, *, local_files_only: bool) -> Path | None:
    """The split's parquet file, or None if it is not in the cache or (not `local_files_only`) cannot be fetched."""
    from huggingface_hub import hf_hub_download
    from huggingface_hub.errors import HfHubHTTPError

    name = f"{CONFIGURATION}/{split}-00000-of-00001.parquet"
    try:
        return Path(hf_hub_download(REPOSITORY, name, repo_type="dataset", local_files_only=local_files_only))
    except (HfHubHTTPError, OSError):  # not in the cache: a FileNotFoundError
        return None


def _parquet_rows(path: Path) -> list[str]:
    import pyarrow.parquet

    rows: list[str] = pyarrow.parquet.read_table(path, columns=["text"])["text"].to_pylist()
    return rows


def _datasets_cache_rows(split: str) -> list[str] | None:
    """Rows left by `datasets.load_dataset("Salesforce/wikitext" or "wikitext", "wikitext-2-raw-v1")`."""
    home = Path(os.environ.get("HF_HOME") or Path.home() / ".cache" / "huggingface")
    cache = Path(os.environ.get("HF_DATASETS_CACHE") or home / "datasets")
    found = sorted(cache.glob(f"*wikitext/{CONFIGURATION}/*/*/*wikitext-{split}.arrow"))
    if not found:
        return None
    import pyarrow

    with pyarrow.memory_map(str(found[-1])) as source:
        rows: list[str] = pyarrow.ipc.open_stream(source).read_all()["text"].to_pylist()
    return rows

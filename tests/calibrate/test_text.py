import hashlib
import json
import lzma
import math
import time
import urllib.error
import urllib.request
from pathlib import Path
from typing import Any

import pyarrow
import pyarrow.parquet
import pytest
import torch

from w4a4.calibrate import bundled_text, wikitext
from w4a4.calibrate.text import calibration_tokens, load_text, token_hash, windows
from w4a4.configs.errors import CheckpointError, NotFoundError, UsageError


class ByteTokenizer:
    """One token per byte, a start token 256 first, as LLaMA's tokenizer puts one."""

    def encode(self, text: str, /, **options: Any) -> list[int]:
        return [256, *text.encode()]


BYTES = ByteTokenizer()


@pytest.fixture(autouse=True)
def empty_caches(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    from huggingface_hub import constants

    monkeypatch.setattr(constants, "HF_HUB_CACHE", str(tmp_path / "hub"))
    monkeypatch.setenv("HF_DATASETS_CACHE", str(tmp_path / "datasets"))
    monkeypatch.setattr(constants, "HF_HUB_OFFLINE", True)
    return tmp_path


def test_bundled_test_split_is_the_usual_perplexity_text() -> None:
    text = load_text("wikitext2", "test", offline=True)
    assert text.sha256 == "696cca6b65a171b0a358a4be6732cdfdf2dd6164a32e20fd70e3c13fc4dfae83"
    assert text.startswith("\n\n = Robert Boulter = \n\n\n\n\n Robert Boulter is an English film")
    assert "bundled" in text.origin and text.name == "wikitext2" and text.split_name == "test"


@pytest.mark.parametrize(
    ("split", "rows", "size"), [("test", 4358, 1290590), ("validation", 3760, 1146846), ("train", 3243, 1002061)]
)
def test_bundled_rows_rebuild_the_raw_file(split: str, rows: int, size: int) -> None:
    found, _ = wikitext.bundled_rows(split)
    raw = "".join(row if row else " \n" for row in found)
    assert (len(found), len(raw.encode())) == (rows, size)


def test_train_says_that_it_is_only_a_part() -> None:
    assert "first 9 %" in load_text("wikitext2-bundled", "train").origin


def test_damaged_bundle_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    folder = tmp_path / "data" / "wikitext2"
    folder.mkdir(parents=True)
    monkeypatch.setattr(bundled_text, "files", lambda package: tmp_path)
    (folder / "test.raw.xz").write_bytes(lzma.compress(b" = Another text = \n"))
    with pytest.raises(CheckpointError, match="damaged"):
        wikitext.bundled_rows("test")
    (folder / "test.raw.xz").write_bytes(b"not xz")
    with pytest.raises(CheckpointError, match="cannot be read"):
        wikitext.bundled_rows("test")


def test_datasets_cache_comes_before_the_bundle(tmp_path: Path) -> None:
    folder = tmp_path / "datasets" / "Salesforce___wikitext" / "wikitext-2-raw-v1" / "0.0.0" / "b08601e04326c79d"
    folder.mkdir(parents=True)
    table = pyarrow.table({"text": ["", " = Cached = \n"]})
    with (
        pyarrow.OSFile(str(folder / "wikitext-test.arrow"), "wb") as sink,
        pyarrow.ipc.new_stream(sink, table.schema) as out,
    ):
        out.write_table(table)
    text = load_text("wikitext2", "test", offline=True)
    assert text == "\n\n = Cached = \n"
    assert text.origin.startswith("datasets cache")


def test_hub_cache_comes_first(tmp_path: Path) -> None:
    commit = "b08601e04326c79dfdd32d625aee71d232d685c3"
    repository = tmp_path / "hub" / "datasets--Salesforce--wikitext"
    snapshot = repository / "snapshots" / commit / "wikitext-2-raw-v1"
    snapshot.mkdir(parents=True)
    (repository / "refs").mkdir()
    (repository / "refs" / "main").write_text(commit)
    pyarrow.parquet.write_table(pyarrow.table({"text": ["from the hub\n"]}), snapshot / "test-00000-of-00001.parquet")
    text = load_text("wikitext2", "test", offline=True)
    assert text == "from the hub\n"
    assert text.origin.startswith("hub cache")


def test_a_silent_network_costs_less_than_two_seconds(monkeypatch: pytest.MonkeyPatch) -> None:
    from huggingface_hub import constants

    monkeypatch.setattr(constants, "HF_HUB_OFFLINE", False)

    def hang(url: str, timeout: float) -> None:
        time.sleep(3)
        raise TimeoutError

    monkeypatch.setattr(urllib.request, "urlopen", hang)
    begin = time.monotonic()
    text = load_text("wikitext2", "test")
    assert time.monotonic() - begin < 2.5
    assert "bundled" in text.origin


def test_no_network_falls_back_to_the_bundle(monkeypatch: pytest.MonkeyPatch) -> None:
    from huggingface_hub import constants

    def refuse(url: str, timeout: float) -> None:
        raise urllib.error.URLError("Name or service not known")

    monkeypatch.setattr(constants, "HF_HUB_OFFLINE", False)
    monkeypatch.setattr(urllib.request, "urlopen", refuse)
    assert load_text("wikitext2", "validation").origin == "bundled, complete"


@pytest.mark.parametrize("split", ["train", "validation", "test"])
def test_stdlib_source_is_long_and_deterministic(split: str) -> None:
    text = load_text("python-stdlib", split)
    assert len(text) > 200_000
    assert text.sha256 == load_text("python-stdlib", split).sha256
    assert "def " in text and text.origin == "bundled, modules of Python 3.11.7"


def test_stdlib_is_the_same_on_every_python() -> None:
    text = load_text("python-stdlib", "test")
    assert text.sha256 == "f1687e6b20fdfda82138e0f37c7f48991c0b8a115763c55dfb5c9da0ea61eb02"
    assert text.startswith("# Author: Steven J. Bethard") and "class ArgumentParser" in text


def test_stdlib_splits_do_not_overlap() -> None:
    assert len({load_text("python-stdlib", split).sha256 for split in wikitext.SPLITS}) == 3
    assert "class ArgumentParser" not in load_text("python-stdlib", "train")


def test_local_files_give_the_same_text(tmp_path: Path) -> None:
    rows = ["first row", "zweite Zeile: äöü"]
    (tmp_path / "a.txt").write_text("\n\n".join(rows), encoding="utf-8")
    (tmp_path / "a.jsonl").write_text("\n".join(json.dumps({"text": row}) for row in rows) + "\n\n")
    pyarrow.parquet.write_table(pyarrow.table({"text": rows}), tmp_path / "a.parquet")
    texts = {load_text(tmp_path / name, "test") for name in ("a.txt", "a.jsonl", "a.parquet")}
    assert texts == {"first row\n\nzweite Zeile: äöü"}


def test_column_can_be_chosen(tmp_path: Path) -> None:
    (tmp_path / "a.jsonl").write_text('{"prompt": "one", "text": "two"}\n')
    assert load_text(tmp_path / "a.jsonl", "test", column="prompt") == "one"


@pytest.mark.parametrize(
    ("name", "content", "error", "message"),
    [
        ("empty.txt", b"", UsageError, "no text"),
        ("blank.txt", b" \n\n ", UsageError, "no text"),
        ("latin.txt", b"caf\xe9 au lait", UsageError, "cannot read"),
        ("bad.jsonl", b'{"text": "a"}\n{"text": ', UsageError, "line 2 is not JSON"),
        ("deep.jsonl", b"[" * 200_000, UsageError, "line 1 is not JSON"),
        ("list.jsonl", b"[1, 2]\n", UsageError, "line 1 has no text"),
        ("column.jsonl", b'{"body": "a"}\n', UsageError, "no text in column 'text'; it has body"),
        ("number.jsonl", b'{"text": 3}\n', UsageError, "no text in column 'text'"),
        ("bad.parquet", b"PAR1 but not really PAR1", UsageError, "not a readable parquet"),
        ("short.parquet", b"", UsageError, "not a readable parquet"),
        ("file.csv", b"a,b\n", NotFoundError, "not a .txt"),
    ],
)
def test_bad_files(tmp_path: Path, name: str, content: bytes, error: type[Exception], message: str) -> None:
    (tmp_path / name).write_bytes(content)
    with pytest.raises(error, match=message):
        load_text(tmp_path / name, "test")


def test_parquet_without_the_column_or_with_nulls(tmp_path: Path) -> None:
    pyarrow.parquet.write_table(pyarrow.table({"body": ["a"], "id": [1]}), tmp_path / "a.parquet")
    with pytest.raises(UsageError, match="no column 'text'; it has body, id"):
        load_text(tmp_path / "a.parquet", "test")
    with pytest.raises(UsageError, match="holds int64"):
        load_text(tmp_path / "a.parquet", "test", column="id")
    pyarrow.parquet.write_table(pyarrow.table({"text": ["a", None]}), tmp_path / "b.parquet")
    with pytest.raises(UsageError, match="without nulls"):
        load_text(tmp_path / "b.parquet", "test")


def test_unknown_names() -> None:
    with pytest.raises(NotFoundError, match="wikitxt2") as raised:
        load_text("wikitxt2", "test")
    assert raised.value.hint == "did you mean wikitext2?"
    with pytest.raises(NotFoundError, match="no such file"):
        load_text("/nowhere/a.txt", "test")
    with pytest.raises(UsageError, match="unknown split 'dev'"):
        load_text("wikitext2", "dev")


def test_windows_are_consecutive_and_drop_the_rest() -> None:
    text = "abcdefghijk"
    assert windows(BYTES, text, 4).tolist() == [[256, 97, 98, 99], [100, 101, 102, 103], [104, 105, 106, 107]]
    assert windows(BYTES, text, 4, max_tokens=11).shape == (2, 4)
    assert windows(BYTES, text, 12).shape == (1, 12)


def test_calibration_windows_are_disjoint_when_there_is_room() -> None:
    text = "".join(chr(0x100 + index) for index in range(300))  # two bytes each, every pair different

    class Characters:
        def encode(self, text: str, /, **options: Any) -> list[int]:
            return [ord(character) for character in text]

    tokens = calibration_tokens(Characters(), text, samples=9, seq=32, seed=3)
    assert tokens.shape == (9, 32) and tokens.dtype == torch.int64
    assert torch.unique(tokens).numel() == 9 * 32
    assert (tokens.diff(dim=1) == 1).all(), "each window is a run of the text"
    crowded = calibration_tokens(Characters(), text, samples=20, seq=32, seed=3)
    assert crowded.shape == (20, 32) and (crowded.diff(dim=1) == 1).all()
    exact = calibration_tokens(Characters(), text, samples=10, seq=30, seed=0)
    assert sorted(exact.flatten().tolist()) == [ord(character) for character in text]


def test_calibration_depends_on_the_seed_and_on_nothing_else() -> None:
    text = load_text("wikitext2-bundled", "train")[:20_000]
    first = calibration_tokens(BYTES, text, 4, 128, seed=1)
    torch.manual_seed(7)
    assert torch.equal(first, calibration_tokens(BYTES, text, 4, 128, seed=1))
    assert not torch.equal(first, calibration_tokens(BYTES, text, 4, 128, seed=2))


def test_starts_cover_the_text_evenly() -> None:
    class Positions:
        def encode(self, text: str, /, **options: Any) -> list[int]:
            return list(range(len(text)))

    starts = calibration_tokens(Positions(), "x" * 10_000, samples=1, seq=10, seed=0)[:, 0].tolist()
    for seed in range(1, 400):
        starts += calibration_tokens(Positions(), "x" * 10_000, samples=1, seq=10, seed=seed)[:, 0].tolist()
    deviation = 10_000 / math.sqrt(12 * len(starts))
    assert abs(sum(starts) / len(starts) - 4_995) < 4 * deviation


def test_token_hash_sees_values_and_shape() -> None:
    tokens = torch.tensor([[1, 2], [3, 4]])
    expected = hashlib.sha256(b"2x2\n" + bytes([1, 0, 0, 0, 2, 0, 0, 0, 3, 0, 0, 0, 4, 0, 0, 0])).hexdigest()
    assert token_hash(tokens) == expected
    assert token_hash(tokens) == token_hash(tokens.to(torch.int32))
    assert token_hash(tokens) != token_hash(tokens.view(1, 4))
    assert token_hash(tokens) != token_hash(tokens.T)


@pytest.mark.parametrize(
    ("samples", "seq", "text", "message"),
    [
        (0, 8, "long enough text", "samples must be at least 1"),
        (1, 1, "long enough text", "seq must be at least 2"),
        (1, 64, "short", "6 tokens, fewer than one window of 64"),
        (1, 8, "  \n", "the text is empty"),
    ],
)
def test_bad_calibration_requests(samples: int, seq: int, text: str, message: str) -> None:
    with pytest.raises(UsageError, match=message):
        calibration_tokens(BYTES, text, samples, seq, seed=0)


def test_bad_window_requests() -> None:
    with pytest.raises(UsageError, match="max_tokens is 7, shorter than one window of 8"):
        windows(BYTES, "long enough text", 8, max_tokens=7)
    with pytest.raises(UsageError, match="fewer than one window"):
        windows(BYTES, "short", 64)

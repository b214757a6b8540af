from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from tokenizers import Tokenizer
from tokenizers.models import WordLevel

from w4a4.configs.errors import CheckpointError, NotFoundError
from w4a4.configs.tokenizer_files import load_tokenizer


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """A tokenizer of the words w0 to w39, and <pad> added as token 40."""
    backend = Tokenizer(WordLevel({f"w{index}": index for index in range(40)}, unk_token="w0"))
    backend.add_special_tokens(["<pad>"])
    backend.save(str(tmp_path / "tokenizer.json"))
    config = {"tokenizer_class": "PreTrainedTokenizerFast", "pad_token": "<pad>"}
    (tmp_path / "tokenizer_config.json").write_text(json.dumps(config))
    return tmp_path


@pytest.mark.parametrize("vocab_size", [40, 41, 64, 82])
def test_it_may_have_padding_and_one_added_token_more(vocab_size: int, folder: Path) -> None:
    assert load_tokenizer(folder, vocab_size).convert_tokens_to_ids(["w3", "<pad>"]) == [3, 40]


@pytest.mark.parametrize(
    ("vocab_size", "said"), [(39, "has token ids up to 39, expected one for .* 39"), (84, "has 41 tokens, expected")]
)
def test_one_of_another_model_is_refused(vocab_size: int, said: str, folder: Path) -> None:
    with pytest.raises(CheckpointError, match=said):
        load_tokenizer(folder, vocab_size)


@pytest.mark.parametrize(
    ("file", "content"),
    [
        ("tokenizer.json", '{"version":'),
        ("tokenizer.json", "[]"),
        ("tokenizer.json", "{}"),
        ("tokenizer.json", '{"version": "1.0", "model": {"type": "WordLevel", "vocab": {"a": -1}}}'),
        ("tokenizer_config.json", "[]"),
        ("tokenizer_config.json", '{"tokenizer_class": 5}'),
        ("special_tokens_map.json", "\x00"),
    ],
)
def test_broken_files_are_told_in_one_line(file: str, content: str, folder: Path) -> None:
    (folder / file).write_text(content)
    with pytest.raises(CheckpointError) as refused:
        load_tokenizer(folder, 40)
    assert "\n" not in refused.value.message and len(refused.value.message) < 500
    assert refused.value.hint


def test_a_folder_without_one(tmp_path: Path) -> None:
    (tmp_path / "tokenizer_config.json").write_text("{}")
    with pytest.raises(NotFoundError, match="holds no tokenizer"):
        load_tokenizer(tmp_path, 40)


def test_no_code_of_the_folder_is_run(folder: Path, tmp_path: Path) -> None:
    config: dict[str, Any] = {"tokenizer_class": "Evil", "auto_map": {"AutoTokenizer": ["evil.Evil", "evil.Evil"]}}
    (folder / "tokenizer_config.json").write_text(json.dumps(config))
    (folder / "evil.py").write_text(f"open({str(tmp_path / 'ran')!r}, 'w')\nclass Evil: pass\n")
    try:
        load_tokenizer(folder, 40)
    except CheckpointError:
        pass
    assert not (tmp_path / "ran").exists()

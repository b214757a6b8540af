import json
from pathlib import Path

import pytest
from live_server import BOS, EOS, byte_tokenizer

from w4a4.configs.errors import CheckpointError, UsageError
from w4a4.serve.tokenizer import ChatTemplateError, Tokenizer, load_tokenizer


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    byte_tokenizer().save_pretrained(tmp_path)
    return tmp_path


def test_text_goes_to_ids_and_back(folder: Path) -> None:
    tokenizer = load_tokenizer(folder, 300)
    text = "Größe 🙂\x00<eos>"
    ids = tokenizer.encode(text)
    assert ids == [*"Größe 🙂\x00".encode(), EOS]
    assert tokenizer.decode(ids) == text
    assert tokenizer.decode(ids, skip_special_tokens=True) == "Größe 🙂\x00"
    with pytest.raises(ValueError, match="lone surrogate at character 1"):
        tokenizer.encode("a\ud800b")


def test_tokens_as_bytes_and_text(folder: Path) -> None:
    tokenizer = load_tokenizer(folder, 300)
    assert [tokenizer.token_bytes(i) for i in range(256)] == [bytes([i]) for i in range(256)]
    assert tokenizer.token_bytes(BOS) == b"<bos>"
    assert tokenizer.token_bytes(9999) == b""
    assert tokenizer.token_text(0xE6) == "bytes:\\xe6"
    assert len({tokenizer.token_text(i) for i in range(258)}) == 258  # different tokens stay different


@pytest.mark.parametrize(
    ("files", "expected"),
    [
        ({}, {EOS}),
        ({"generation_config.json": {"eos_token_id": [7, 8]}}, {EOS, 7, 8}),
        ({"generation_config.json": {}, "config.json": {"eos_token_id": 9}}, {EOS, 9}),
        ({"generation_config.json": {"eos_token_id": 7}, "config.json": {"eos_token_id": 9}}, {EOS, 7}),
        ({"config.json": {"eos_token_id": None}}, {EOS}),
    ],
)
def test_all_ends_of_text_are_found(folder: Path, files: dict[str, object], expected: set[int]) -> None:
    for name, content in files.items():
        (folder / name).write_text(json.dumps({"model_type": "llama", **content} if "gen" not in name else content))  # type: ignore[dict-item]
    assert load_tokenizer(folder, 300).eos_ids == expected


@pytest.mark.parametrize("content", ['{"eos_token_id": "two"}', '{"eos_token_id": [-1]}', "[]", "{"])
def test_ends_of_text_that_are_none_are_refused(folder: Path, content: str) -> None:
    (folder / "generation_config.json").write_text(content)
    with pytest.raises(CheckpointError, match="generation_config.json"):
        load_tokenizer(folder, 300)


def test_broken_tokenizer_files_are_the_checkpoints_fault(folder: Path, tmp_path: Path) -> None:
    (folder / "tokenizer.json").write_text("{}")
    with pytest.raises(CheckpointError, match="the tokenizer cannot be read"):
        load_tokenizer(folder, 300)


def test_a_template_of_ones_own(folder: Path, tmp_path: Path) -> None:
    file = tmp_path / "mine.jinja"
    file.write_text("{% for m in messages %}[{{ m.content }}]{% endfor %}")
    messages = [{"role": "user", "content": "a"}, {"role": "assistant", "content": "b"}]
    tokenizer = load_tokenizer(folder, 300, chat_template=file)
    assert tokenizer.render_chat(messages, {"add_generation_prompt": True}) == "[a][b]"
    with pytest.raises(UsageError, match="--chat-template .*nowhere.jinja"):
        load_tokenizer(folder, 300, chat_template=tmp_path / "nowhere.jinja")
    with pytest.raises(ChatTemplateError, match="no chat template"):
        Tokenizer(byte_tokenizer(None)).render_chat(messages, {})

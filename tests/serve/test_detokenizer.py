import random

import pytest

from w4a4.serve.detokenizer import Detokenizer, StopStrings


def decode(ids: list[int] | tuple[int, ...]) -> str:
    return bytes(ids).decode(errors="replace")


def decode_words(ids: list[int] | tuple[int, ...]) -> str:
    """Like sentencepiece: the first word of a text loses its leading space."""
    return "".join(f" word{token}" for token in ids).removeprefix(" ")


@pytest.mark.parametrize("seed", range(20))
def test_pieces_add_up_to_the_text(seed: int) -> None:
    generator = random.Random(seed)
    text = "".join(generator.choice("ab é漢字🙂\u0301\u200d👩🏽") for _ in range(60))
    detokenizer = Detokenizer(decode)
    pieces = [detokenizer.push(byte, is_last=False) for byte in text.encode()]
    pieces.append(detokenizer.push(None, is_last=True))
    assert "".join(pieces) == text
    assert not any("\ufffd" in piece for piece in pieces)


def test_the_prompt_is_the_context_of_the_first_token() -> None:
    detokenizer = Detokenizer(decode_words, [7, 8])
    assert [detokenizer.push(token) for token in range(30)] == [f" word{token}" for token in range(30)]


def test_a_character_cut_by_the_prompts_end_is_completed() -> None:
    before, after = "é".encode()
    detokenizer = Detokenizer(decode, [*b"caf", before])
    assert detokenizer.push(after) == "é"


def test_invalid_utf8_is_shown_in_the_end() -> None:
    detokenizer = Detokenizer(decode)
    assert detokenizer.push(ord("a")) == "a"
    assert detokenizer.push(0xE6) == ""
    assert detokenizer.push(None, is_last=True) == "\ufffd"
    endless = Detokenizer(decode)
    assert "".join(endless.push(0xFF) for _ in range(40)) == "\ufffd" * 37
    assert endless.push(None, is_last=True) == "\ufffd" * 3


def test_random_tokens_give_the_text_of_the_whole() -> None:
    """Bytes that are mostly no text, and tokens that have none: what is handed out is still the text of all of them."""

    def decode_some(ids: list[int] | tuple[int, ...]) -> str:
        return bytes(token for token in ids if token < 256).decode(errors="replace")

    prompt = list(b"prompt")
    for seed in range(400):
        generator = random.Random(seed)
        data = generator.choices([*range(0xC0, 0xF5), *range(0x80, 0xC0), 65, 66, *range(256, 280)], k=80)
        detokenizer = Detokenizer(decode_some, prompt)
        text = "".join(detokenizer.push(token) for token in data[:-1]) + detokenizer.push(data[-1], is_last=True)
        assert text == decode_some(data), seed


@pytest.mark.parametrize("sizes", [(1,), (2,), (3, 1), (7,), (100,)])
def test_stop_strings_wherever_the_text_is_cut(sizes: tuple[int, ...]) -> None:
    text, stop = "one two STO STOP three", "STOP"
    watcher = StopStrings([stop, "never"])
    shown, start, index = "", 0, 0
    while start < len(text):
        size = sizes[index % len(sizes)]
        piece, reason, matched = watcher.push(text[start : start + size])
        shown += piece
        start, index = start + size, index + 1
        if reason:
            assert (reason, matched) == (stop, stop)
            break
        assert not shown.endswith("S") or start < text.index(stop)
    assert shown == "one two STO "


def test_the_stop_string_that_ends_first_wins() -> None:
    assert StopStrings(["cde", "bc", "abcdef"]).push("xabcdef") == ("xa", "bc", "bc")
    assert StopStrings(["c", "bc"]).push("abc") == ("a", "bc", "bc")  # same end: the longer one


def test_text_held_for_a_stop_string_is_shown_at_the_end() -> None:
    watcher = StopStrings(["<|end|>"])
    assert watcher.push("hello <|en") == ("hello ", None, "")
    assert watcher.push("ough") == ("<|enough", None, "")
    assert watcher.push("<|e") == ("", None, "")
    assert watcher.push("", is_last=True) == ("<|e", None, "")


def test_stop_strings_in_tokens() -> None:
    detokenizer = Detokenizer(decode, stop=["漢b"], include_stop=True)
    shown = ""
    for byte in "a漢漢bc".encode():
        shown += detokenizer.push(byte)
        if detokenizer.stop_reason:
            break
    assert (shown, detokenizer.stop_reason) == ("a漢漢b", "漢b")


def test_stop_strings_wait_for_min_tokens() -> None:
    detokenizer = Detokenizer(decode, stop=["a"], min_tokens=3)
    assert [detokenizer.push(ord("a")) for _ in range(3)] == ["a", "a", ""]
    assert detokenizer.stop_reason == "a"

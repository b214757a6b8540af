"""The page at / in a real browser: it streams, stops, shows speed and precision path, and survives what users do."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
from browser import Browser, is_installed
from fake_runner import FakeRunner
from live_server import LiveServer

pytestmark = [pytest.mark.e2e, pytest.mark.skipif(not is_installed(), reason="needs chromium and chromedriver")]

StartServer = Callable[..., LiveServer]
LAST = "[...document.querySelectorAll('.message.assistant')].at(-1)"


@pytest.fixture(scope="module")
def browser() -> Iterator[Browser]:
    opened = Browser()
    yield opened
    opened.close()


@pytest.fixture
def live(start_server: StartServer) -> LiveServer:
    """Answers in ASCII letters only: token 32 .. 126, 20 ms each."""
    return start_server(FakeRunner(vocab_size=127, num_pages=64, max_model_len=1024, step_seconds=0.02))


def ask(browser: Browser, text: str) -> None:
    browser.type("#input", text)
    browser.click("#send")


def test_it_streams_and_tells_speed_and_path(browser: Browser, live: LiveServer, tmp_path: Path) -> None:
    browser.open(live.url)
    browser.wait("return document.title === 'fake-model'")
    assert browser.text("#path") == "cpu: fake; 1024 tokens"
    browser.click("#options-button")
    browser.run("document.getElementById('temperature').value = 0; document.getElementById('max_tokens').value = 60")
    ask(browser, "Hello, <b>model</b>?")
    first = browser.wait(f"return {LAST}?.querySelector('span').textContent")
    assert browser.text("#send") == "Stop"
    browser.wait("return document.getElementById('send').textContent === 'Send'")
    answer = browser.run(f"return {LAST}.querySelector('span').textContent")
    assert answer == live.answer("<user>Hello, <b>model</b>?<assistant>", 60)
    assert len(first) < len(answer), "it came in one piece"
    # HTML in what users and models write is text.
    assert (
        browser.run("return document.querySelector('.message.user span').innerHTML")
        == "Hello, &lt;b&gt;model&lt;/b&gt;?"
    )
    speed = browser.run(f"return {LAST}.querySelector('.speed').textContent")
    assert speed.startswith("60 tokens, ") and speed.endswith("tokens/s, cut at the limit")
    assert 5 < float(speed.split(", ")[1].split(" ")[0]) < 60
    # The next turn sends what was said before.
    ask(browser, "More")
    browser.wait("return document.querySelectorAll('.message').length === 4")
    browser.wait("return document.getElementById('send').textContent === 'Send'")
    expected = live.answer(f"<user>Hello, <b>model</b>?<assistant>{answer}<user>More<assistant>", 60)
    assert browser.run(f"return {LAST}.querySelector('span').textContent") == expected
    browser.screenshot(Path(os.environ.get("W4A4_SCREENSHOT", tmp_path / "chat.png")))
    assert browser.console() == []


def test_stop_ends_the_generation(browser: Browser, live: LiveServer) -> None:
    browser.open(live.url)
    ask(browser, "Go on for ever")
    browser.wait(f"return {LAST}?.querySelector('span').textContent.length > 3")
    browser.click("#send")
    browser.wait("return document.getElementById('send').textContent === 'Send'")
    assert browser.run(f"return {LAST}.querySelector('.speed').textContent").endswith(", stopped")
    live.wait_until_idle(5)
    assert live.engine.stats().num_output_tokens < 500
    browser.click("#clear")
    assert browser.run("return document.querySelectorAll('.message').length") == 0
    assert browser.console() == []


def test_it_asks_for_a_key_and_shows_errors(browser: Browser, start_server: StartServer) -> None:
    live = start_server(FakeRunner(vocab_size=127, max_model_len=64), api_keys=("secret",))
    browser.open(live.url)
    browser.wait("return document.getElementById('path').textContent.includes('API key')")
    ask(browser, "Hello")
    browser.wait("return document.querySelector('.message.failed')")
    assert "a valid API key is required" in browser.run(f"return {LAST}.textContent")
    browser.type("#key", "secret\t")
    browser.wait("return document.title === 'fake-model'")
    ask(browser, "x" * 100)
    browser.wait("return document.querySelectorAll('.message.failed').length === 2")
    assert "maximum context length is 64 tokens" in browser.run(f"return {LAST}.textContent")
    ask(browser, "Hello")
    browser.wait(f"return {LAST}.querySelector('.speed').textContent.includes('tokens/s')")

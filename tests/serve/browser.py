"""Headless Chromium through chromedriver's HTTP interface (W3C WebDriver), as far as the page's tests need it."""

from __future__ import annotations

import base64
import shutil
import socket
import subprocess
import tempfile
import time
from pathlib import Path
from typing import Any

import httpx

ELEMENT = "element-6066-11e4-a52e-4f735466cecf"
ARGUMENTS = [
    "--headless",
    "--no-sandbox",
    "--disable-gpu",
    "--disable-quic",
    "--disable-dev-shm-usage",
    "--no-first-run",
    "--disable-background-networking",
    "--disable-component-update",
    "--disable-sync",
    "--window-size=900,700",
]


def is_installed() -> bool:
    return bool(shutil.which("chromedriver") and shutil.which("chromium"))


class Browser:
    """One window. Elements are named by CSS selectors."""

    def __init__(self) -> None:
        self._profile = tempfile.TemporaryDirectory()
        with socket.socket() as free:
            free.bind(("127.0.0.1", 0))
            port = free.getsockname()[1]
        self._driver = subprocess.Popen(
            ["chromedriver", f"--port={port}"], stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL
        )
        self._client = httpx.Client(base_url=f"http://127.0.0.1:{port}", timeout=60)
        self._wait_for_driver()
        options = {"binary": shutil.which("chromium"), "args": [*ARGUMENTS, f"--user-data-dir={self._profile.name}"]}
        wanted = {
            "capabilities": {
                "alwaysMatch": {
                    "browserName": "chrome",
                    "goog:chromeOptions": options,
                    "goog:loggingPrefs": {"browser": "ALL"},
                }
            }
        }
        self._session = f"/session/{self._call('POST', '/session', wanted)['sessionId']}"

    def _wait_for_driver(self) -> None:
        deadline = time.monotonic() + 20
        while True:
            try:
                self._client.get("/status")
                return
            except httpx.TransportError:
                if time.monotonic() > deadline:
                    raise
                time.sleep(0.05)

    def _call(self, method: str, path: str, body: dict[str, Any] | None = None) -> Any:
        response = self._client.request(method, path, json=body if method == "POST" else None)
        value = response.json()["value"]
        if response.status_code != 200:
            raise RuntimeError(f"{path}: {value['error']}: {value['message'].splitlines()[0]}")
        return value

    def _element(self, selector: str) -> str:
        found = self._call("POST", f"{self._session}/element", {"using": "css selector", "value": selector})
        return f"{self._session}/element/{found[ELEMENT]}"

    def open(self, url: str) -> None:
        self._call("POST", f"{self._session}/url", {"url": url})

    def click(self, selector: str) -> None:
        self._call("POST", f"{self._element(selector)}/click", {})

    def type(self, selector: str, text: str) -> None:
        self._call("POST", f"{self._element(selector)}/value", {"text": text})

    def text(self, selector: str) -> str:
        return str(self._call("GET", f"{self._element(selector)}/property/textContent"))

    def run(self, script: str) -> Any:
        return self._call("POST", f"{self._session}/execute/sync", {"script": script, "args": []})

    def wait(self, script: str, timeout: float = 20) -> Any:
        """Until the script returns something true, and that."""
        deadline = time.monotonic() + timeout
        while not (value := self.run(script)):
            if time.monotonic() > deadline:
                raise TimeoutError(f"never true: {script}\n{self.run('return document.body.innerText')}")
            time.sleep(0.05)
        return value

    def console(self) -> list[str]:
        """Errors that the page's console has got since the last call."""
        entries = self._call("POST", f"{self._session}/se/log", {"type": "browser"})
        return [entry["message"] for entry in entries if entry["level"] == "SEVERE"]

    def screenshot(self, path: Path) -> None:
        path.write_bytes(base64.b64decode(self._call("GET", f"{self._session}/screenshot")))

    def close(self) -> None:
        try:
            self._call("DELETE", self._session)
        finally:
            self._client.close()
            self._driver.terminate()
            self._driver.wait(10)
            self._profile.cleanup()

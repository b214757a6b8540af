"""A server in a process of its own, forked from one that has imported everything: starting takes no seconds."""

from __future__ import annotations

import json
import multiprocessing
import os
import signal
import socket
import sys
import time
from multiprocessing.connection import Connection
from multiprocessing.process import BaseProcess
from pathlib import Path

import httpx
from fake_runner import FakeRunner
from live_server import byte_tokenizer

from w4a4.cli.failure import report_failure
from w4a4.cli.main import run
from w4a4.serve.process import ServerProcess, bind
from w4a4.serve.settings import ServeSettings
from w4a4.serve.tokenizer import Tokenizer

CONTEXT = multiprocessing.get_context("forkserver")


def prepare() -> None:
    """Start the process that others are forked from."""
    folder = str(Path(__file__).parent)
    path = os.environ.get("PYTHONPATH", "")
    os.environ["PYTHONPATH"] = folder + (os.pathsep + path if path else "")
    CONTEXT.set_forkserver_preload(["child_server"])


def serve(settings: dict[str, object], runner: dict[str, object], errors: str, ready: Connection) -> None:
    """What the child does, from its first line to its exit code."""
    os.dup2(os.open(errors, os.O_WRONLY | os.O_CREAT), 2)
    resolved = ServeSettings(checkpoint=Path("fake-model"), port=0, log_level="critical", **settings)  # type: ignore[arg-type]
    tokenizer = Tokenizer(byte_tokenizer())
    process = ServerProcess(
        resolved,
        bind("127.0.0.1", 0),
        FakeRunner(**runner),  # type: ignore[arg-type]
        tokenizer,
        tokenizer.eos_ids,
        ready.send,
    )
    try:
        code = process.run()
    except Exception as error:
        code = report_failure(error, 0)
    sys.exit(code)


class Child:
    """Started on construction; `url` is where it listens."""

    def __init__(self, errors: Path, settings: dict[str, object], runner: dict[str, object]) -> None:
        self._errors = errors
        ready, theirs = CONTEXT.Pipe()
        self.process = CONTEXT.Process(target=serve, args=(settings, runner, str(errors), theirs))
        self.process.start()
        theirs.close()
        assert ready.poll(60), "the server did not start"
        self.url: str = ready.recv()
        ready.close()
        self.client = httpx.Client(base_url=self.url, timeout=20)

    def stream(self, max_tokens: int) -> tuple[socket.socket, bytes]:
        """A streaming answer that has begun: its socket, and what came so far."""
        body = json.dumps({"prompt": "go on", "max_tokens": max_tokens, "stream": True, "ignore_eos": True}).encode()
        head = (
            f"POST /v1/completions HTTP/1.1\r\nhost: x\r\ncontent-type: application/json\r\ncontent-length: {len(body)}"
        )
        connection = socket.create_connection(("127.0.0.1", int(self.url.rsplit(":", 1)[1])), timeout=20)
        connection.sendall(head.encode() + b"\r\n\r\n" + body)
        received = b""
        while b'"text"' not in received:
            more = connection.recv(65536)
            assert more, f"the answer ended before its first text: {received.decode()}"
            received += more
        return connection, received

    def signal(self, number: signal.Signals) -> None:
        assert self.process.pid is not None
        os.kill(self.process.pid, number)

    def wait(self, timeout: float = 20) -> tuple[int | None, str]:
        """Exit code and what was written to standard error."""
        self.process.join(timeout)
        return self.process.exitcode, self._errors.read_text()

    def close(self) -> None:
        self.client.close()
        if self.process.is_alive():
            self.process.kill()
        self.process.join(10)
        self.process.close()


def run_command(arguments: list[str], out: str, err: str) -> None:
    """The child: the command line's own entry, its streams in files."""
    os.dup2(os.open(out, os.O_WRONLY | os.O_CREAT), 1)
    os.dup2(os.open(err, os.O_WRONLY | os.O_CREAT), 2)
    sys.exit(run(arguments))


class Command:
    """`w4a4` with arguments, its streams in files of `folder`."""

    def __init__(self, folder: Path, arguments: list[str]) -> None:
        self._out, self._err = folder / "out", folder / "err"
        self.process: BaseProcess = CONTEXT.Process(
            target=run_command, args=(arguments, str(self._out), str(self._err))
        )
        self.process.start()

    @property
    def out(self) -> str:
        return self._out.read_text() if self._out.exists() else ""

    @property
    def err(self) -> str:
        return self._err.read_text() if self._err.exists() else ""

    def wait(self, timeout: float = 60) -> int | None:
        self.process.join(timeout)
        return self.process.exitcode

    def url(self) -> str:
        """Once it serves: the address from its --json document."""
        deadline = time.monotonic() + 60
        while time.monotonic() < deadline and self.process.is_alive():
            try:
                document = json.loads(self.out)
            except ValueError:
                time.sleep(0.02)
                continue
            return str(document["server"]["url"] if "server" in document else document["url"])
        raise TimeoutError(f"it does not serve: {self.out}\n{self.err}")

    def stop(self) -> int | None:
        if self.process.is_alive() and self.process.pid is not None:
            os.kill(self.process.pid, signal.SIGTERM)
        return self.wait(20)

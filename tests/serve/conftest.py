"""Shared by the tests of this room: the fake model, an engine around it, and a way to collect what it says."""

from __future__ import annotations

import sys
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
import torch

sys.path.insert(0, str(Path(__file__).parent))

from fake_runner import FakeRunner  # noqa: E402
from live_server import LiveServer  # noqa: E402
from tiny_packed import write_packed  # noqa: E402

from w4a4.serve.engine import Engine, EngineConfig  # noqa: E402
from w4a4.serve.request import Output, Request, SamplingParams  # noqa: E402

EOS = 257

torch.set_num_threads(1)  # rows of 300 logits: more threads only wait for each other


def decode_bytes(ids: list[int], skip_special: bool) -> str:
    """Token i < 256 is byte i; the rest are special."""
    text = ""
    run = bytearray()
    for token in ids:
        if token < 256:
            run.append(token)
        else:
            text += run.decode(errors="replace") + ("" if skip_special else f"<{token}>")
            run.clear()
    return text + run.decode(errors="replace")


class Harness:
    """An engine on a fake runner; `outputs` merges what came per request."""

    def __init__(self, runner: FakeRunner, config: EngineConfig) -> None:
        self.runner = runner
        self.outputs: dict[str, Output] = {}
        self.num_outputs: dict[str, int] = {}
        self._news = threading.Condition()
        self.engine = Engine(runner, decode_bytes, config, self._listen)
        self._next_id = 0

    def _listen(self, outputs: list[Output]) -> None:
        with self._news:
            for output in outputs:
                self.num_outputs[output.request_id] = self.num_outputs.get(output.request_id, 0) + 1
                if output.request_id in self.outputs:
                    assert self.outputs[output.request_id].finish_reason is None, "an output after the last one"
                    self.outputs[output.request_id].extend(output)
                else:
                    self.outputs[output.request_id] = output
            self._news.notify_all()

    def request(self, prompt: list[int] | str, **params: object) -> Request:
        self._next_id += 1
        ids = tuple(prompt.encode() if isinstance(prompt, str) else prompt)
        params.setdefault("temperature", 0.0)
        return Request(f"r{self._next_id}", ids, SamplingParams(**params))  # type: ignore[arg-type]

    def submit(self, prompt: list[int] | str, **params: object) -> str:
        request = self.request(prompt, **params)
        self.engine.submit([request])
        return request.request_id

    def wait(self, *ids: str, timeout: float = 20.0) -> list[Output]:
        """The finished outputs of these requests."""
        deadline = time.monotonic() + timeout
        with self._news:
            while not all(key in self.outputs and self.outputs[key].finish_reason for key in ids):
                left = deadline - time.monotonic()
                if left <= 0:
                    raise TimeoutError(f"no end of {[k for k in ids if k not in self.outputs]} after {timeout} s")
                self._news.wait(left)
            return [self.outputs[key] for key in ids]

    def wait_until(self, condition: Callable[[], bool], timeout: float = 20.0) -> None:
        deadline = time.monotonic() + timeout
        while not condition():
            if time.monotonic() > deadline:
                raise TimeoutError("the condition did not become true")
            time.sleep(0.002)

    def run(self, prompt: list[int] | str, **params: object) -> Output:
        return self.wait(self.submit(prompt, **params))[0]


StartEngine = Callable[..., Harness]


@pytest.fixture
def start_engine() -> Iterator[StartEngine]:
    """Start engines on a fake runner: keywords of FakeRunner, and `config` for the engine."""
    started: list[Harness] = []

    def start(config: EngineConfig | None = None, **runner: object) -> Harness:
        harness = Harness(FakeRunner(**runner), config or EngineConfig(eos_ids=frozenset({EOS})))  # type: ignore[arg-type]
        harness.engine.start()
        started.append(harness)
        return harness

    yield start
    for harness in started:
        harness.runner.gate.set()
        harness.engine.shutdown()
        assert harness.runner.is_closed


@pytest.fixture(scope="session")
def server() -> Iterator[LiveServer]:
    """One server for all tests that leave it as they found it."""
    live = LiveServer()
    yield live
    live.wait_until_idle()
    assert live.stop() == 0


@pytest.fixture
def start_server() -> Iterator[Callable[..., LiveServer]]:
    """Servers with settings of their own."""
    started: list[LiveServer] = []

    def start(runner: FakeRunner | None = None, **settings: object) -> LiveServer:
        started.append(LiveServer(runner, **settings))
        return started[-1]

    yield start
    for live in started:
        live.stop()


PackedFolder = Callable[..., Path]


@pytest.fixture(scope="session")
def packed_folder(tmp_path_factory: pytest.TempPathFactory) -> PackedFolder:
    """`packed_folder("qwen3", "dual", sink_tokens=0)`: a tiny checkpoint, made once; beside it stands its `source`."""
    made: dict[tuple[object, ...], Path] = {}

    def make(kind: str, recipe: str = "dual", **overrides: object) -> Path:
        key = (kind, recipe, *sorted(overrides.items()))
        if key not in made:
            made[key] = write_packed(tmp_path_factory.mktemp("packed"), kind, recipe, **overrides)
        return made[key]

    return make

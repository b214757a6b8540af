"""Leave a server running under unkind clients and see whether anything is lost, wrong or kept.

Clients of mixed lengths over real HTTP: a third of them leave in the middle of a stream, some send nonsense, and the
page pool is small enough that requests are preempted all the time. At the end every finished greedy answer has been
compared with the one that the prompt gets alone, no request is missing, all pages are free, and memory has not grown.

    python benchmarks/soak.py --minutes 30 --clients 16
"""

from __future__ import annotations

import argparse
import asyncio
import gc
import json
import random
import resource
import sys
import time
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parent.parent
sys.path.insert(0, str(ROOT / "tests" / "serve"))

import torch  # noqa: E402
from fake_runner import FakeRunner  # noqa: E402
from live_server import LiveServer  # noqa: E402


@dataclass
class Tally:
    """What became of the requests. `memory` is resident MiB, one reading per interval."""

    sent: int = 0
    finished: int = 0
    left: int = 0
    refused: int = 0
    wrong: list[str] = field(default_factory=list)
    lost: list[str] = field(default_factory=list)
    preemptions: int = 0
    prefix_hits: int = 0
    steps: int = 0
    output_tokens: int = 0
    pages_in_use_at_the_end: int = 0
    memory: list[float] = field(default_factory=list)

    @property
    def memory_growth(self) -> float:
        """MiB between the median of the second quarter of the readings and that of the last one."""
        quarter = max(1, len(self.memory) // 4)
        early, late = sorted(self.memory[quarter : 2 * quarter]), sorted(self.memory[-quarter:])
        if not early or not late:
            return 0.0
        return late[len(late) // 2] - early[len(early) // 2]


def resident_mib() -> float:
    pages = int(Path("/proc/self/statm").read_text().split()[1])
    return pages * resource.getpagesize() / 2**20


class Client:
    """One client with its own random choices and one request at a time."""

    def __init__(self, live: LiveServer, tally: Tally, seed: int) -> None:
        self._live = live
        self._tally = tally
        self._random = random.Random(seed)

    async def run(self, deadline: float) -> None:
        while time.monotonic() < deadline:
            self._tally.sent += 1
            prompt, count = self._prompt()
            is_streamed = self._random.random() < 0.7
            leaves = self._random.random() < 1 / 3
            try:
                await asyncio.wait_for(self._ask(prompt, count, is_streamed, leaves), 120)
            except TimeoutError:
                self._tally.lost.append(f"no answer in 120 s: {prompt!r}")
            except (OSError, asyncio.IncompleteReadError, ValueError) as error:
                self._tally.lost.append(f"{type(error).__name__} {error}: {prompt!r}")

    def _prompt(self) -> tuple[str, int]:
        # Shared beginnings make the prefix cache matter; a few prompts are nearly as long as the model allows.
        shared = "The same beginning, again and again. " * self._random.choice([0, 1, 1, 3])
        own = "".join(chr(self._random.randrange(97, 123)) for _ in range(self._random.choice([1, 8, 30, 90])))
        return shared + own, self._random.choice([1, 8, 30, 60, 150])

    async def _ask(self, prompt: str, count: int, is_streamed: bool, leaves: bool) -> None:
        reader, writer = await asyncio.open_connection(self._live.host, self._live.port)
        try:
            body = {"prompt": prompt, "max_tokens": count, "temperature": 0, "stream": is_streamed}
            if self._random.random() < 0.2:
                body |= {"temperature": 1.0, "top_p": 0.9, "presence_penalty": 0.5, "logprobs": 2}
            content = json.dumps(body).encode() if self._random.random() > 0.03 else b'{"prompt": '
            head = "POST /v1/completions HTTP/1.1\r\nhost: x\r\ncontent-type: application/json\r\n"
            writer.write(f"{head}content-length: {len(content)}\r\n\r\n".encode() + content)
            if leaves and not is_streamed:
                await asyncio.sleep(self._random.random() * 0.05)
                self._tally.left += 1
                return
            status = int((await reader.readuntil(b"\r\n\r\n")).split(b" ", 2)[1])
            if status != 200:
                if status not in (400, 503):
                    self._tally.wrong.append(f"status {status}: {prompt!r}")
                self._tally.refused += 1
                return
            text = await (self._read_events(reader, leaves) if is_streamed else self._read_body(reader))
            if text is None:
                self._tally.left += 1
                return
            self._tally.finished += 1
            if body["temperature"] == 0 and text != self._live.answer(prompt, count):
                self._tally.wrong.append(f"{prompt!r}: {text!r}")
        finally:
            writer.close()

    async def _read_body(self, reader: asyncio.StreamReader) -> str:
        answer = json.loads(await reader.readuntil(b"}}}"))
        return str(answer["choices"][0]["text"])

    async def _read_events(self, reader: asyncio.StreamReader, leaves: bool) -> str | None:
        text = ""
        num_left = self._random.randrange(1, 20) if leaves else -1
        while True:
            line = await reader.readline()
            if not line:
                raise ValueError("the stream ended without [DONE]")
            if not line.startswith(b"data: "):
                continue  # chunk sizes and blank lines
            if line.startswith(b"data: [DONE]"):
                return text
            event: dict[str, Any] = json.loads(line[6:])
            if "error" in event:
                raise ValueError(event["error"]["message"])
            text += event["choices"][0]["text"]
            num_left -= 1
            if num_left == 0:
                return None


async def watch(live: LiveServer, tally: Tally, deadline: float, interval: float) -> None:
    while time.monotonic() < deadline:
        await asyncio.sleep(interval)
        gc.collect()
        tally.memory.append(round(resident_mib(), 2))


def soak(
    seconds: float,
    num_clients: int,
    *,
    step_seconds: float = 0.0,
    num_pages: int = 26,
    seed: int = 0,
    is_asynchronous: bool = False,
) -> Tally:
    """Run the clients for `seconds` and count. The pool holds a few of the requests that want to run at once.

    is_asynchronous: the engine runs a step ahead of the tokens it knows, as on a GPU.
    """
    runner = FakeRunner(
        num_pages=num_pages, max_model_len=384, num_sink_slots=24, step_seconds=step_seconds,
        is_asynchronous=is_asynchronous,
    )  # fmt: skip
    live = LiveServer(runner, max_num_seqs=12, max_num_batched_tokens=64)
    tally = Tally()
    deadline = time.monotonic() + seconds

    async def run_all() -> None:
        clients = [Client(live, tally, seed + number) for number in range(num_clients)]
        interval = max(0.2, seconds / 200)
        await asyncio.gather(watch(live, tally, deadline, interval), *(client.run(deadline) for client in clients))

    asyncio.run(run_all())
    live.wait_until_idle(30)
    stats = live.engine.stats()
    tally.preemptions = stats.num_preemptions
    tally.prefix_hits = stats.num_prefix_hits
    tally.steps = stats.num_steps
    tally.output_tokens = stats.num_output_tokens
    tally.pages_in_use_at_the_end = stats.num_pages_in_use
    outcome = live.stop()
    if outcome != 0:
        tally.lost.append(f"the server ended with {outcome!r}")
    return tally


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else "")
    parser.add_argument("--minutes", type=float, default=30.0)
    parser.add_argument("--clients", type=int, default=16)
    parser.add_argument("--pages", type=int, default=26, help="pages of 16 tokens in the pool")
    parser.add_argument("--step-ms", type=float, default=2.0, help="time that a step of the model takes")
    parser.add_argument("--seed", type=int, default=0)
    arguments = parser.parse_args()
    torch.set_num_threads(1)  # rows of 300 logits: more threads only wait for each other
    tally = soak(
        arguments.minutes * 60,
        arguments.clients,
        step_seconds=arguments.step_ms / 1e3,
        num_pages=arguments.pages,
        seed=arguments.seed,
    )
    print(json.dumps({**asdict(tally), "memory_growth_mib": round(tally.memory_growth, 2)}, indent=1))
    is_good = not tally.wrong and not tally.lost and tally.pages_in_use_at_the_end == 0 and tally.memory_growth < 8
    return 0 if is_good and tally.preemptions and tally.left else 1


if __name__ == "__main__":
    raise SystemExit(main())

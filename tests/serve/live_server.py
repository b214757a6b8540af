"""A real server on 127.0.0.1 around the fake model: uvicorn in a thread, a byte-level tokenizer, any settings."""

from __future__ import annotations

import threading
import time
from pathlib import Path
from typing import Any

import httpx
from fake_runner import FakeRunner
from tokenizers import AddedToken, Regex, decoders, models, pre_tokenizers
from tokenizers import Tokenizer as RustTokenizer
from transformers import PreTrainedTokenizerFast

from w4a4.configs.generation_config import NOTHING_SAID, PartialSampling
from w4a4.serve.process import ServerProcess, bind
from w4a4.serve.settings import ServeSettings
from w4a4.serve.tokenizer import Tokenizer

BOS, EOS = 256, 257
CHAT_TEMPLATE = (
    "{% for message in messages %}{% if message['role'] == 'tool' %}{{ raise_exception('no tools here') }}{% endif %}"
    "<{{ message['role'] }}>{{ message['content'] }}{% endfor %}{% if add_generation_prompt %}<assistant>{% endif %}"
)


def byte_tokenizer(chat_template: str | None = CHAT_TEMPLATE) -> PreTrainedTokenizerFast:
    """Token i < 256 is byte i, 256 and 257 are <bos> and <eos>."""
    printable = [*range(33, 127), *range(161, 173), *range(174, 256)]
    letters = {byte: chr(byte) for byte in printable}
    letters |= {byte: chr(256 + i) for i, byte in enumerate(b for b in range(256) if b not in printable)}
    rust = RustTokenizer(models.BPE({letters[byte]: byte for byte in range(256)}, []))
    rust.pre_tokenizer = pre_tokenizers.Sequence(
        [
            pre_tokenizers.Split(Regex(r"[\s\S]{1,64}"), "isolated"),
            pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False),
        ]
    )
    rust.decoder = decoders.ByteLevel()
    rust.add_special_tokens([AddedToken("<bos>", special=True), AddedToken("<eos>", special=True)])
    return PreTrainedTokenizerFast(
        tokenizer_object=rust, bos_token="<bos>", eos_token="<eos>", chat_template=chat_template
    )


class LiveServer:
    """Started on construction. `stop` ends it as SIGTERM would and returns what `run` returned or raised."""

    def __init__(
        self,
        runner: FakeRunner | None = None,
        chat_template: str | None = CHAT_TEMPLATE,
        sampling: PartialSampling = NOTHING_SAID,
        **settings: Any,
    ) -> None:
        self.runner = runner or FakeRunner(num_pages=256, max_model_len=1024)
        self.settings = ServeSettings(
            checkpoint=Path("fake-model"),
            port=0,
            **{"log_level": "critical", "max_num_seqs": 16, "request_timeout": 5.0, "shutdown_timeout": 5.0} | settings,
        )
        self.tokenizer = Tokenizer(byte_tokenizer(chat_template))
        bound = bind(self.settings.host, 0)
        self._ready = threading.Event()
        self.url = ""
        self.outcome: int | BaseException | None = None
        self.process = ServerProcess(
            self.settings, bound, self.runner, self.tokenizer, self.tokenizer.eos_ids, self._announce, sampling
        )
        self.engine = self.process.engine
        self.host, self.port = bound.getsockname()[:2]
        self._thread = threading.Thread(target=self._run, daemon=True)
        self._thread.start()
        if not self._ready.wait(20):
            raise TimeoutError(f"the server did not start: {self.outcome}")
        headers = {"authorization": f"Bearer {self.settings.api_keys[0]}"} if self.settings.api_keys else {}
        self.client = httpx.Client(base_url=self.url, timeout=20, headers=headers)

    def _announce(self, url: str) -> None:
        self.url = url
        self._ready.set()

    def _run(self) -> None:
        try:
            self.outcome = self.process.run()
        except BaseException as error:
            self.outcome = error

    def answer(self, prompt: str | list[int], count: int) -> str:
        """The text of the greedy answer to a prompt given alone."""
        ids = list(prompt.encode()) if isinstance(prompt, str) else prompt
        return self.tokenizer.decode(self.runner.expected_answer(ids, count, frozenset({EOS})), True)

    def wait_until_idle(self, timeout: float = 10.0) -> None:
        deadline = time.monotonic() + timeout
        while self.engine.num_live or self.engine.stats().num_pages_in_use:
            if time.monotonic() > deadline:
                raise TimeoutError(f"{self.engine.num_live} requests live, {self.engine.stats()}")
            time.sleep(0.005)

    def join(self, timeout: float = 20.0) -> int | BaseException | None:
        self._thread.join(timeout)
        if self._thread.is_alive():
            raise TimeoutError("the server did not end")
        return self.outcome

    def stop(self) -> int | BaseException | None:
        self.client.close()
        if isinstance(self.runner, FakeRunner):
            self.runner.gate.set()
        if self._thread.is_alive():
            self.process.stop()
        return self.join()

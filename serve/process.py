"""A server as a process: the socket first, then the model, then requests; signals, and how it all ends.

The port is taken before the model is loaded, so a port in use is told at once and not after minutes. SIGTERM or SIGINT
stops new requests and lets those that are there finish for `shutdown_timeout` seconds, then aborts them, each with
a proper last message; a second signal does not wait. If the engine fails, its requests are told, then the process ends.
"""

from __future__ import annotations

import asyncio
import ipaddress
import logging
import signal
import socket
import threading
from collections.abc import Callable, Generator
from contextlib import contextmanager
from types import FrameType
from typing import TYPE_CHECKING, Any

import uvicorn

from w4a4.configs.errors import UsageError, W4A4Error
from w4a4.configs.generation_config import NOTHING_SAID, PartialSampling
from w4a4.serve.engine import Engine, EngineConfig
from w4a4.serve.failures import ApiError
from w4a4.serve.metrics import Metrics
from w4a4.serve.runner import Runner
from w4a4.serve.server import create_app
from w4a4.serve.service import Service
from w4a4.serve.settings import ServeSettings
from w4a4.serve.streams import Dispatcher
from w4a4.serve.tokenizer import Tokenizer

if TYPE_CHECKING:
    from uvicorn.protocols.http.h11_impl import H11Protocol as HttpProtocol
else:
    try:  # a parser in C, if it is there: a fifth less time per chunk
        from uvicorn.protocols.http.httptools_impl import HttpToolsProtocol as HttpProtocol
    except ImportError:
        from uvicorn.protocols.http.h11_impl import H11Protocol as HttpProtocol

logger = logging.getLogger("w4a4.serve")

BACKLOG = 2048
MAX_HEAD_BYTES = 65536  # of a request's line and headers
LAST_WORDS_SECONDS = 5.0  # for aborted requests to get their last message out


def bind(host: str, port: int) -> socket.socket:
    """A bound socket that does not listen yet. Raises UsageError if the address cannot be had."""
    try:
        family, kind, protocol, _, address = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM)[0]
    except socket.gaierror as error:
        raise UsageError(f"--host {host}: {error.strerror}") from None
    bound = socket.socket(family, kind, protocol)
    try:
        bound.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        bound.bind(address)
    except OSError as error:
        bound.close()
        raise UsageError(
            f"cannot listen on {host} port {port}: {error.strerror}",
            hint="choose another with --port (0 = any free one)",
        ) from None
    return bound


class PatientProtocol(HttpProtocol):
    """HTTP/1.1 that closes connections whose request head does not arrive in time (slow-loris) or has no end."""

    head_timeout = 30.0
    num_head_bytes = 0

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
        super().connection_made(transport)
        self._head_timer: asyncio.TimerHandle | None = None
        self._watch_head()

    def data_received(self, data: bytes) -> None:
        super().data_received(data)
        self._watch_head()
        self.num_head_bytes = self.num_head_bytes + len(data) if self._head_timer is not None else 0
        if self.num_head_bytes > MAX_HEAD_BYTES:
            self._give_up()

    def connection_lost(self, exc: Exception | None) -> None:
        self._stop_timer()
        super().connection_lost(exc)

    def send_400_response(self, msg: str) -> None:
        body = ApiError(400, "this is no valid HTTP/1.1 request").json
        head = "HTTP/1.1 400 Bad Request\r\nconnection: close\r\ncontent-type: application/json\r\n"
        self.transport.write(f"{head}content-length: {len(body)}\r\n\r\n".encode() + body)
        self.transport.close()

    def _watch_head(self) -> None:
        is_waiting = self.cycle is None or self.cycle.response_complete
        if is_waiting and self._head_timer is None:
            self._head_timer = self.loop.call_later(self.head_timeout, self._give_up)
        elif not is_waiting:
            self._stop_timer()

    def _stop_timer(self) -> None:
        if self._head_timer is not None:
            self._head_timer.cancel()
            self._head_timer = None

    def _give_up(self) -> None:
        self._stop_timer()
        if not self.transport.is_closing():
            self.transport.close()


class _Uvicorn(uvicorn.Server):
    """uvicorn with our signals: it must end with an exit code, not by raising the signal again."""

    def __init__(self, config: uvicorn.Config, on_signal: Callable[[int], None]) -> None:
        super().__init__(config)
        self._on_signal = on_signal

    @contextmanager
    def capture_signals(self) -> Generator[None, None, None]:
        if threading.current_thread() is not threading.main_thread():
            yield
            return
        previous = {number: signal.signal(number, self.handle_exit) for number in (signal.SIGINT, signal.SIGTERM)}
        try:
            yield
        finally:
            for number, handler in previous.items():
                signal.signal(number, handler)

    def handle_exit(self, sig: int, frame: FrameType | None) -> None:
        if self.should_exit:
            self.force_exit = True
        self.should_exit = True
        self._on_signal(sig)


class ServerProcess:
    """One engine and its HTTP server on a bound socket. `run` blocks until the end and returns the exit code.

    Args:
        bound: from `bind`; listening starts in `run`.
        eos_ids: tokens that end an answer, beside those that a request names.
        on_ready: called with the URL once requests are taken.
        sampling: what holds where a request says nothing.
    """

    def __init__(
        self,
        settings: ServeSettings,
        bound: socket.socket,
        runner: Runner,
        tokenizer: Tokenizer,
        eos_ids: frozenset[int],
        on_ready: Callable[[str], None] = lambda url: None,
        sampling: PartialSampling = NOTHING_SAID,
    ) -> None:
        self._settings = settings
        self._bound = bound
        self._on_ready = on_ready
        self._signal = 0
        self._abort_timer: asyncio.TimerHandle | None = None
        # The metrics read the engine, which is made below.
        self._metrics = Metrics(lambda: self.engine.stats(), settings.model_name)
        self._dispatcher = Dispatcher(self._metrics.observe, self._metrics.count_abort)
        self.engine = Engine(
            runner,
            lambda ids, skip_special: tokenizer.decode(ids, skip_special),
            EngineConfig(
                max_num_seqs=settings.max_num_seqs,
                max_num_batched_tokens=max(settings.max_num_batched_tokens, settings.max_num_seqs),
                max_queued=settings.max_queued,
                is_prefix_caching=settings.is_prefix_caching,
                eos_ids=eos_ids,
                seed=settings.seed,
            ),
            self._dispatcher.listen,
        )
        self._service = Service(self.engine, self._dispatcher, tokenizer, settings.model_name, self._metrics, sampling)
        protocol = type("Protocol", (PatientProtocol,), {"head_timeout": settings.request_timeout})
        config = uvicorn.Config(
            create_app(self._service, settings),
            http=protocol,
            log_config=None,
            log_level=settings.log_level,
            access_log=settings.log_level == "debug",
            timeout_keep_alive=max(5, int(settings.request_timeout)),
            timeout_graceful_shutdown=int(settings.shutdown_timeout + LAST_WORDS_SECONDS),
            lifespan="off",
            server_header=False,
            ws="none",
            backlog=BACKLOG,
        )
        if settings.log_level == "debug":
            logging.getLogger("uvicorn").handlers = logging.getLogger("w4a4").handlers
        self._uvicorn = _Uvicorn(config, self._heard)

    def run(self) -> int:
        """Serve until a signal or the engine's failure.

        Returns 0 after SIGTERM, 130 after SIGINT; raises W4A4Error if the engine failed.
        """
        host = self._bound.getsockname()[0]
        if not self._settings.api_keys and not ipaddress.ip_address(host).is_loopback:
            logger.warning("listening on %s without --api-key: whoever reaches this address may use the model", host)
        asyncio.run(self._serve())
        if self.engine.failure is not None:
            raise W4A4Error(f"the engine failed: {self.engine.failure}", hint="w4a4 doctor")
        return 130 if self._signal == signal.SIGINT else 0

    def stop(self) -> None:
        """As SIGTERM does, from any thread."""
        self._uvicorn.handle_exit(signal.SIGTERM, None)

    async def _serve(self) -> None:
        loop = asyncio.get_running_loop()
        self._loop = loop
        self._dispatcher.attach(self.engine, loop)
        self.engine.start()
        self._bound.listen(BACKLOG)
        host, port = self._bound.getsockname()[:2]
        announcer = asyncio.ensure_future(self._announce(f"http://{f'[{host}]' if ':' in host else host}:{port}"))
        watcher = asyncio.ensure_future(self._watch_engine())
        try:
            await self._uvicorn.serve(sockets=[self._bound])
        finally:
            announcer.cancel()
            watcher.cancel()
            if self._abort_timer is not None:
                self._abort_timer.cancel()
            self._service.close()
            await loop.run_in_executor(None, self.engine.shutdown)

    async def _announce(self, url: str) -> None:
        while not self._uvicorn.started:
            await asyncio.sleep(0.01)
        self._on_ready(url)

    async def _watch_engine(self) -> None:
        """Ends the server soon after the engine has failed: its requests are told first."""
        while self.engine.failure is None:
            await asyncio.sleep(0.1)
        logger.critical("the engine failed: the server ends")
        await asyncio.sleep(0.5)
        self._uvicorn.should_exit = True

    def _heard(self, number: int) -> None:
        """In the main thread, between two lines of whatever ran there: only flags and thread-safe calls."""
        is_second = self._signal != 0
        self._signal = self._signal or number
        self._loop.call_soon_threadsafe(self._drain, 0.0 if is_second else self._settings.shutdown_timeout)

    def _drain(self, timeout: float) -> None:
        self.engine.drain()
        if self.engine.num_live:
            logger.info("stopping: %d requests may go on for %g s", self.engine.num_live, timeout)
        self._abort_timer = self._loop.call_later(timeout, self.engine.abort_all, "the server is shutting down")


def explain_lines(runner: Runner) -> list[dict[str, Any]]:
    """What `--explain` prints: per layer, bits and kernel that will really run."""
    return [
        {
            "layer": layer.name,
            "shape": layer.shape,
            "weights": layer.weight_bits,
            "activations": layer.act_bits,
            "kernel": layer.kernel,
        }
        for layer in runner.explain()
    ]

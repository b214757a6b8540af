"""From the engine's thread to the event loop: outputs find the HTTP request that waits for them.

The engine calls once per step; the loop is woken once per step, however many requests are on. A reader that is slower
than the engine gets its pieces merged, so nothing grows but the text itself.
"""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import Callable, Sequence
from types import TracebackType

from w4a4.serve.engine import Engine
from w4a4.serve.request import Output, Request


class Channel:
    """The outputs of one HTTP request's sequences, numbered by choice. Event loop only.

    Leaving it (`close`, or as a context manager) aborts whatever is not finished.
    """

    def __init__(self, dispatcher: Dispatcher, request_ids: Sequence[str]) -> None:
        self._dispatcher = dispatcher
        self._choice_of = {request_id: choice for choice, request_id in enumerate(request_ids)}
        self._pending: dict[int, Output] = {}
        self._waiter: asyncio.Future[None] | None = None
        self.is_disconnected = False

    @property
    def num_open(self) -> int:
        """Sequences that have not finished, or whose end has not been read."""
        return len(self._choice_of) + len(self._pending)

    async def next(self) -> list[tuple[int, Output]]:
        """Everything that came since the last call, one output per choice; waits if there is nothing.

        Empty only when the client is gone.
        """
        if not self._pending and not self.is_disconnected:
            self._waiter = asyncio.get_running_loop().create_future()
            try:
                await self._waiter
            finally:
                self._waiter = None
        if self.is_disconnected:
            return []
        items = list(self._pending.items())
        self._pending.clear()
        return items

    def disconnect(self) -> None:
        """The client is gone: whoever waits in `next` gets nothing more."""
        self.is_disconnected = True
        self._wake()

    def close(self) -> None:
        """Abort what is not finished. May be called again."""
        for request_id in self._choice_of:
            self._dispatcher.forget(request_id)
        self._choice_of.clear()

    def put(self, output: Output) -> None:
        choice = self._choice_of[output.request_id]
        if output.finish_reason is not None:
            del self._choice_of[output.request_id]
        pending = self._pending.get(choice)
        if pending is None:
            self._pending[choice] = output
        else:
            pending.extend(output)
        self._wake()

    def _wake(self) -> None:
        if self._waiter is not None and not self._waiter.done():
            self._waiter.set_result(None)

    def __enter__(self) -> Channel:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()


class Dispatcher:
    """Hands the engine's outputs to their channels.

    `listen` is the engine's listener; `attach` names the engine and the loop once both are there. In the event loop,
    `on_finish` sees the last output of every request that somebody waited for; `on_abort` is called for every other.
    """

    def __init__(self, on_finish: Callable[[Output], None], on_abort: Callable[[], None]) -> None:
        self._on_finish = on_finish
        self._on_abort = on_abort
        self._engine: Engine | None = None
        self._loop: asyncio.AbstractEventLoop | None = None
        self._channels: dict[str, Channel] = {}
        self._inbox: deque[list[Output]] = deque()

    def attach(self, engine: Engine, loop: asyncio.AbstractEventLoop) -> None:
        self._engine = engine
        self._loop = loop

    def listen(self, outputs: list[Output]) -> None:
        """From the engine's thread."""
        assert self._loop is not None
        self._inbox.append(outputs)
        if len(self._inbox) == 1:  # else the loop has been told and has not come to the end of it
            try:
                self._loop.call_soon_threadsafe(self._deliver)
            except RuntimeError:  # the loop is closed: the server is gone, nobody waits
                self._inbox.clear()

    def open(self, requests: Sequence[Request]) -> Channel:
        """Submit requests and get the channel of their outputs. Raises what `Engine.submit` raises."""
        assert self._engine is not None
        channel = Channel(self, [request.request_id for request in requests])
        for request in requests:
            self._channels[request.request_id] = channel
        try:
            self._engine.submit(requests)
        except BaseException:
            for request in requests:
                del self._channels[request.request_id]
            raise
        return channel

    def forget(self, request_id: str) -> None:
        """Nobody waits for this request any more: abort it."""
        if self._channels.pop(request_id, None) is not None:
            assert self._engine is not None
            self._engine.abort(request_id)
            self._on_abort()

    def _deliver(self) -> None:
        while self._inbox:
            # Removed only after it was handled: what comes meanwhile needs no second wake-up.
            for output in self._inbox[0]:
                channel = self._channels.get(output.request_id)
                if channel is None:
                    continue
                channel.put(output)
                if output.finish_reason is not None:
                    del self._channels[output.request_id]
                    self._on_finish(output)
            self._inbox.popleft()

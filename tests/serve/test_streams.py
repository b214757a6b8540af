from __future__ import annotations

import asyncio
from typing import Any, cast

import pytest
from live_server import byte_tokenizer

from w4a4.serve.request import FinishReason, Output
from w4a4.serve.responses import ChoiceText, Reply
from w4a4.serve.server import EventStream
from w4a4.serve.streams import Channel, Dispatcher
from w4a4.serve.tokenizer import Tokenizer


def output(request_id: str, text: str, finish: FinishReason | None = None, error: str = "") -> Output:
    return Output(request_id, text, [1] * len(text), [], 1, len(text), 0, finish_reason=finish, error=error)


async def sent_by(outputs: list[Output]) -> bytes:
    """The body of a stream of two choices whose reader comes when all outputs are there."""
    channel = Channel(cast(Dispatcher, None), ["a", "b"])
    for news in outputs:
        channel.put(news)
    channel._choice_of.clear()  # nobody is left to abort
    reply = Reply(Tokenizer(byte_tokenizer()), "m", is_chat=False, choices=[ChoiceText(), ChoiceText()])
    body = b""

    async def send(message: Any) -> None:
        nonlocal body
        body += message.get("body", b"")

    async def receive() -> Any:
        await asyncio.Event().wait()

    await EventStream(reply, channel)({"type": "http"}, receive, send)
    return body


@pytest.mark.parametrize(
    ("finish", "code"), [(FinishReason.ERROR, b'"engine_error"'), (FinishReason.ABORT, b'"aborted"')]
)
def test_text_that_came_with_a_failure_is_not_lost(finish: FinishReason, code: bytes) -> None:
    outputs = [
        output("a", "first"),
        output("a", "", finish, "the device is gone"),
        output("b", "second"),
        output("b", "", finish, "the device is gone"),
    ]
    body = asyncio.run(sent_by(outputs))
    assert body.count(b'"text": "first"') == body.count(b'"text": "second"') == 1
    assert body.count(b"the device is gone") == body.count(code) == 1
    assert body.count(b'"finish_reason": null') == 2 and b'"finish_reason": "' not in body
    assert body.index(b"second") < body.index(b"the device is gone") < body.index(b"[DONE]")

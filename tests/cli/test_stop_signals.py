from __future__ import annotations

import os
import signal
import sys

import click
import pytest

from w4a4.cli.failure import explain
from w4a4.cli.stop_signals import StopSignals, resumable
from w4a4.configs.errors import StoppedError


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_the_first_signal_is_a_wish_the_second_an_end(number: signal.Signals) -> None:
    before = signal.getsignal(number)
    with StopSignals() as signals:
        assert not signals.is_requested
        os.kill(os.getpid(), number)
        assert signals.is_requested
        with pytest.raises(KeyboardInterrupt):
            os.kill(os.getpid(), number)
            signal.sigtimedwait([], 1)
    assert signal.getsignal(number) is before


@pytest.mark.parametrize(("stop", "code"), [(KeyboardInterrupt(), 130), (StoppedError("stopped after a layer"), 75)])
def test_whatever_stops_a_resumable_command_says_how_to_go_on(
    stop: BaseException, code: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(sys, "argv", ["/usr/bin/w4a4", "quantize", "a model"])

    @resumable
    def command() -> None:
        raise stop

    with pytest.raises(type(stop)) as stopped:
        command()
    message, hint, exit_code = explain(stopped.value)
    assert exit_code == code
    assert message in ("interrupted", "stopped after a layer")
    assert hint == "w4a4 quantize 'a model'  # what was finished is kept"


def test_ctrl_c_says_how_to_go_on_although_click_wraps_it() -> None:
    @click.command()
    @resumable
    def command() -> None:
        raise KeyboardInterrupt

    with pytest.raises(click.Abort) as stopped:
        command.main([], standalone_mode=False)
    assert explain(stopped.value)[1].endswith("# what was finished is kept")

from __future__ import annotations

import os
import signal

import pytest

from w4a4.cli.stop_signals import StopSignals


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

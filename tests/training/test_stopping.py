"""Tests of stopping a run by signals and by its time limit."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time

import pytest

from fugaku_gpt.comm import Communicator
from fugaku_gpt.machine.job_limit import JobLimit
from fugaku_gpt.training import stopping
from fugaku_gpt.training.stopping import StopRequest

STUCK = """
import signal, sys, time
from fugaku_gpt.training import stopping
stopping._DUPLICATE_SECONDS, stopping._PATIENCE_SECONDS = 0.05, 0.3
with stopping.StopRequest():
    signal.pthread_sigmask(signal.SIG_BLOCK, [])
    signal.signal(signal.SIGTERM, lambda *_: None)  # a main thread that does not come to it
    print("ready", flush=True)
    while True:
        time.sleep(60)
"""


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGUSR1])
def test_a_signal_requests_a_stop_and_is_the_reason(number: signal.Signals) -> None:
    former = signal.getsignal(number)
    with StopRequest() as stop:
        assert not stop.should_stop()
        os.kill(os.getpid(), number)
        assert stop.should_stop() and stop.reason.startswith(number.name)
        assert stop.agreed_reason(Communicator.alone()) == stop.reason
    assert signal.getsignal(number) is former


def test_duplicates_of_a_signal_within_a_short_time_count_once(monkeypatch: pytest.MonkeyPatch) -> None:
    with StopRequest() as stop:
        for _ in range(3):
            os.kill(os.getpid(), signal.SIGTERM)
        assert stop.should_stop()
        monkeypatch.setattr(stopping, "_DUPLICATE_SECONDS", 0.0)
        time.sleep(0.01)
        with pytest.raises(KeyboardInterrupt):
            os.kill(os.getpid(), signal.SIGTERM)


def test_ctrl_c_ends_at_once_only_while_nothing_would_be_lost() -> None:
    with StopRequest() as stop, pytest.raises(KeyboardInterrupt):
        os.kill(os.getpid(), signal.SIGINT)
    with StopRequest() as stop:
        stop.should_stop()
        os.kill(os.getpid(), signal.SIGINT)
        assert stop.should_stop() and "SIGINT" in stop.reason


def test_a_second_signal_ends_a_process_that_does_not_handle_the_first() -> None:
    process = subprocess.Popen([sys.executable, "-c", STUCK], stdout=subprocess.PIPE, stderr=subprocess.PIPE)
    assert process.stdout is not None and process.stdout.readline() == b"ready\n"
    process.send_signal(signal.SIGTERM)
    time.sleep(0.5)
    process.send_signal(signal.SIGTERM)
    _, error_output = process.communicate(timeout=30)
    assert process.returncode == 128 + signal.SIGTERM and b"second SIGTERM" in error_output


def test_a_run_stops_when_another_step_would_pass_the_margin(monkeypatch: pytest.MonkeyPatch) -> None:
    clock = [1000.0]
    monkeypatch.setattr(time, "monotonic", lambda: clock[0])
    monkeypatch.setattr(time, "time", lambda: 5000.0 + clock[0])
    distant = StopRequest(JobLimit(time.time() + 100.0, 110.0, "PJM"), margin=10.0)
    assert not distant.should_stop() and not distant.should_stop()
    imminent = StopRequest(JobLimit(time.time() + 10.3, 110.0, "PJM"), margin=10.0)
    assert not imminent.should_stop()
    clock[0] += 0.1
    assert not imminent.should_stop()  # there is time for another step of this length
    clock[0] += 0.15  # 0.05 s are left, and the next step may take as long as this one
    assert imminent.should_stop() and imminent.reason == "0:00:10 before the time limit of 0:01:50 (PJM)"


def test_an_evaluation_that_comes_before_the_next_step_must_fit_too(monkeypatch: pytest.MonkeyPatch) -> None:
    clock = [1000.0]
    monkeypatch.setattr(time, "monotonic", lambda: clock[0])
    monkeypatch.setattr(time, "time", lambda: 5000.0 + clock[0])
    stop, evaluation = StopRequest(JobLimit(time.time() + 100.0, 110.0, "PJM"), margin=10.0), [0.0]
    stop.time_before_next_step = lambda: evaluation[0]
    assert not stop.should_stop()
    clock[0] += 41.0
    stop.leave_out(40.0)  # it was no part of the step, which took a second
    assert not stop.should_stop()
    clock[0] += 1.0
    evaluation[0] = 46.0
    assert not stop.should_stop()  # 48 s are left
    clock[0] += 2.0
    assert stop.should_stop()  # 46 s for the evaluation, and 2 for a step

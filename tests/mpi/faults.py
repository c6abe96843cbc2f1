"""Runs ``fugaku-gpt train`` on a rank with one injected fault, to test reports on hangs.

    mpirun -n 2 python -m tests.mpi.faults FAULT.json train ... --out RUN_DIR

The fault strikes one rank in one step, at the n-th call of that step on one communicator; what the diagnosis should
name is written to RUN_DIR/fault.json. Kinds: see ``KINDS``.
"""

from __future__ import annotations

import json
import os
import random
import re
import signal
import sys
import time
from dataclasses import asdict, dataclass
from pathlib import Path
from types import FrameType
from typing import Any, Callable, Dict, Optional, Tuple

import torch

from fugaku_gpt.cli.main import run
from fugaku_gpt.comm import Communicator, world
from fugaku_gpt.comm.flight_recorder import FlightRecorder
from fugaku_gpt.comm.pending import Pending
from fugaku_gpt.training.trainer import Step, Trainer

# what is done instead of, before or in the call
CALL_KINDS = ("skip", "extra", "shape", "order", "swallow")  # the rank leaves the common path
STATE_KINDS = ("loop", "stop", "die", "native")  # the rank stops: in Python, by SIGSTOP, by SIGKILL, in C code
KINDS = CALL_KINDS + STATE_KINDS
SLOW = "slow"  # no fault: now and then a rank pauses
_MESSAGES = ("start_send", "start_receive")
_METHODS = ("all_reduce", "start_all_reduce", "start_reduce_scatter", "start_all_gather", *_MESSAGES)


@dataclass(frozen=True)
class Fault:
    """A fault to inject.

    Attributes:
        rank: the rank that it strikes.
        group: name of the communicator.
        step: its iteration, from 1.
        nth: number of the call on it in that step, from 0; of a slow run, the least number of calls of a step.
        method: method of the communicator; "" for any.
        seconds: longest pause of a slow rank.
    """

    kind: str
    rank: int
    group: str
    step: int
    nth: int = 0
    method: str = ""
    seconds: float = 0.0


class Swallowed(Exception):
    """Raised within a step, and swallowed by the code around it."""


class FaultInjector:
    """Injects the fault into this process's communicators."""

    def __init__(self, fault: Fault, directory: Path) -> None:
        self._fault = fault
        self._directory = directory
        self._groups: Dict[str, Communicator] = {}
        self._seen = 0
        self._step = -1
        self._done = False
        self._dice = random.Random(f"{fault.rank} {os.getpid()}")

    def install(self) -> None:
        """Patches the communicator's methods, and the trainer's step for an exception that is swallowed."""
        original_init = Communicator.__init__

        def init_and_register(group: Communicator, *args: Any, **more: Any) -> None:
            original_init(group, *args, **more)
            self._groups[group.name] = group

        Communicator.__init__ = init_and_register  # type: ignore[method-assign]
        for method in _METHODS:
            setattr(Communicator, method, self._wrapped(method, getattr(Communicator, method)))
        step = Trainer.step

        def swallowing_step(trainer: Trainer) -> Step:
            try:
                return step(trainer)
            except Swallowed:
                trainer.iteration += 1
                return Step(0.0, 0.0, 0.0, 1, 1)

        Trainer.step = swallowing_step  # type: ignore[method-assign]

    def _wrapped(self, method: str, original: Callable[..., Any]) -> Callable[..., Any]:
        def call(group: Communicator, tensor: torch.Tensor, *more: Any) -> Any:
            if self._fault.kind == SLOW:
                if group.size > 1:  # the call is a sign of life: between two pauses there is one
                    self._pause()
            elif self._strikes(group, method):
                return self._strike(group, method, original, tensor, more)
            return original(group, tensor, *more)

        return call

    def _strikes(self, group: Communicator, method: str) -> bool:
        fault, recorder = self._fault, group.recorder
        if recorder is None or recorder.rank != fault.rank or group.size == 1 or group.name != fault.group:
            return False
        if recorder.step != fault.step or (fault.method or method) != method or self._done:
            return False
        self._seen += 1
        return self._seen == fault.nth + 1

    def _strike(
        self,
        group: Communicator,
        method: str,
        original: Callable[..., Any],
        tensor: torch.Tensor,
        more: Tuple[Any, ...],
    ) -> Any:
        self._done = True
        self._record_expected(group)
        kind = self._fault.kind
        nothing = Pending(group, [], -1, None) if method.startswith("start_") else None
        if kind == "skip":
            return nothing
        if kind == "extra":
            extra = original(group, tensor.detach().clone(), *more)
            if method not in _MESSAGES and extra is not None:
                extra.wait()
        elif kind == "shape":
            tensor = torch.cat([tensor.detach().reshape(-1)] * 2).contiguous()
        elif kind == "order":
            self._other(group).all_reduce(torch.zeros(5, dtype=torch.float64))
        elif kind == "swallow":
            raise Swallowed
        elif kind == "loop":
            while True:
                pass
        elif kind == "native":
            re.match(r"(a+)+$", "a" * 64 + "b")  # takes longer than the universe, and keeps the interpreter
        elif kind == "stop":
            os.kill(os.getpid(), signal.SIGSTOP)
        elif kind == "die":
            os.kill(os.getpid(), signal.SIGKILL)
        return original(group, tensor, *more)

    def _other(self, group: Communicator) -> Communicator:
        return next(
            other for other in self._groups.values() if other.size > 1 and other.name not in (group.name, "node")
        )

    def _record_expected(self, group: Communicator) -> None:
        recorder = group.recorder
        assert recorder is not None
        expected = {
            **asdict(self._fault),
            "site": recorder.call_site(),  # type: ignore[attr-defined]
            "phase": recorder.phase,
            "micro_batch": recorder._micro_batch,
            "process": os.getpid(),
            "time": time.time(),
            "other": self._other(group).name if self._fault.kind == "order" else "",
        }
        (self._directory / "fault.json").write_text(json.dumps(expected), encoding="utf-8")

    def _pause(self) -> None:
        if self._dice.random() * self._fault.nth < 0.2:  # a layout of many calls must finish too
            time.sleep(self._dice.random() * self._fault.seconds)


class CallerRecorder(FlightRecorder):
    """A flight recorder that skips the lines of this file when it looks for the line of a call."""

    def _site(self) -> int:
        return self._name(self.call_site())

    def call_site(self) -> str:
        """Returns the line that makes the call, outside the package of communicators and this file."""
        frame: Optional[FrameType] = sys._getframe(1)
        while frame is not None:
            name = Path(frame.f_code.co_filename)
            if name.parent.name != "comm" and name.name != "faults.py":
                return f"{name.parent.name}/{name.name}:{frame.f_lineno}"
            frame = frame.f_back
        return "?"


def main() -> int:
    """Runs the command; returns its exit code."""
    fault = Fault(**json.loads(sys.argv[1]))
    arguments = sys.argv[2:]
    world.FlightRecorder = CallerRecorder  # type: ignore[misc]
    FaultInjector(fault, Path(arguments[arguments.index("--out") + 1])).install()
    return run(arguments)


if __name__ == "__main__":
    sys.exit(main())

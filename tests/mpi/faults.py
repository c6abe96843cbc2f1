"""``fugaku-gpt train`` on a rank, with one fault built in: what a hang's report is tested with.

    mpirun -n 2 python -m tests.mpi.faults FAULT.json train ... --out RUN_DIR

The fault strikes one rank in one step, at the n-th call of that step on one communicator; what it should be found to be
is written to RUN_DIR/fault.json. Kinds: see ``KINDS``.
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
STATE_KINDS = ("loop", "stop", "die", "native")  # the rank does not go on: Python, SIGSTOP, SIGKILL, C code
KINDS = CALL_KINDS + STATE_KINDS
SLOW = "slow"  # no fault: every now and then a rank takes its time
_MESSAGES = ("start_send", "start_receive")
_METHODS = ("all_reduce", "start_all_reduce", "start_reduce_scatter", "start_all_gather", *_MESSAGES)


@dataclass(frozen=True)
class Fault:
    """One fault.

    Attributes:
        rank: that it strikes.
        group: name of the communicator.
        step: iteration, from 1.
        nth: call on it in that step, from 0; of a slow run, how many calls a step makes at least.
        method: of the communicator; "" for any.
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
    """Raised in the midst of a step, and swallowed around it."""


class Struck:
    """Puts the fault into this process's communicators."""

    def __init__(self, fault: Fault, directory: Path) -> None:
        self._fault = fault
        self._directory = directory
        self._groups: Dict[str, Communicator] = {}
        self._seen = 0
        self._step = -1
        self._done = False
        self._dice = random.Random(f"{fault.rank} {os.getpid()}")

    def install(self) -> None:
        """Patch the communicator's methods, and the trainer's step for an exception that is swallowed."""
        begin = Communicator.__init__

        def with_name(group: Communicator, *args: Any, **more: Any) -> None:
            begin(group, *args, **more)
            self._groups[group.name] = group

        Communicator.__init__ = with_name  # type: ignore[method-assign]
        for method in _METHODS:
            setattr(Communicator, method, self._wrapped(method, getattr(Communicator, method)))
        step = Trainer.step

        def swallowing(trainer: Trainer) -> Step:
            try:
                return step(trainer)
            except Swallowed:
                trainer.iteration += 1
                return Step(0.0, 0.0, 0.0, 1, 1)

        Trainer.step = swallowing  # type: ignore[method-assign]

    def _wrapped(self, method: str, original: Callable[..., Any]) -> Callable[..., Any]:
        def call(group: Communicator, tensor: torch.Tensor, *more: Any) -> Any:
            if self._fault.kind == SLOW:
                if group.size > 1:  # the call is a sign of life: between two pauses there is one
                    self._dawdle()
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
        self._note(group)
        kind = self._fault.kind
        nothing = Pending(group, [], -1, None) if method.startswith("start_") else None
        if kind == "skip":
            return nothing
        if kind == "extra":
            twice = original(group, tensor.detach().clone(), *more)
            if method not in _MESSAGES and twice is not None:
                twice.wait()
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

    def _note(self, group: Communicator) -> None:
        recorder = group.recorder
        assert recorder is not None
        told = {
            **asdict(self._fault),
            "site": recorder.site_now(),  # type: ignore[attr-defined]
            "phase": recorder.phase,
            "micro_batch": recorder._micro_batch,
            "process": os.getpid(),
            "time": time.time(),
            "other": self._other(group).name if self._fault.kind == "order" else "",
        }
        (self._directory / "fault.json").write_text(json.dumps(told), encoding="utf-8")

    def _dawdle(self) -> None:
        if self._dice.random() * self._fault.nth < 0.2:  # a layout of many calls must come to its end too
            time.sleep(self._dice.random() * self._fault.seconds)


class Plain(FlightRecorder):
    """A recorder that does not take this file's lines for those that call."""

    def _site(self) -> int:
        return self._name(self.site_now())

    def site_now(self) -> str:
        """The line that has led here, outside the package of communicators and this file."""
        frame: Optional[FrameType] = sys._getframe(1)
        while frame is not None:
            name = Path(frame.f_code.co_filename)
            if name.parent.name != "comm" and name.name != "faults.py":
                return f"{name.parent.name}/{name.name}:{frame.f_lineno}"
            frame = frame.f_back
        return "?"


def main() -> int:
    """Exit code of the command."""
    fault = Fault(**json.loads(sys.argv[1]))
    words = sys.argv[2:]
    world.FlightRecorder = Plain  # type: ignore[misc]
    Struck(fault, Path(words[words.index("--out") + 1])).install()
    return run(words)


if __name__ == "__main__":
    sys.exit(main())

"""Compares calls between the ranks before they are made, in debug runs (``node.check_collectives``).

Each rank sends its next call as text of a fixed length on a separate communicator, so that ranks that make different
calls still understand each other. A rank that makes no call at all is waited for; that is the watchdog's case.
"""

from __future__ import annotations

import os
import sys
from typing import Any, Callable, Dict, List, Optional, Tuple

import numpy as np

from fugaku_gpt.comm.mpi import MPI
from fugaku_gpt.errors import CallsDisagree
from fugaku_gpt.layout.operations import RECEIVE, SEND
from fugaku_gpt.records.text import spans

_TEXT_SIZE = 256  # bytes
_PACKAGE_DIR = os.path.dirname(os.path.abspath(__file__))
Wait = Callable[[MPI.Request], None]


class CallCheck:
    """Compares the calls of one communicator. One is made on all of its ranks together."""

    def __init__(self, handle: MPI.Comm, name: str, members: List[int], wait: Wait) -> None:
        """``members``: world ranks, for messages to a person; ``wait``: how this process waits."""
        self._handle = handle.Dup()
        self._name = name
        self._members = members
        self._wait = wait
        self._sent: List[Tuple[MPI.Request, "np.ndarray[Any, Any]"]] = []  # with what must live until it has left
        self._message: Optional[MessageCheck] = None

    def before(self, operation: str, signature: str, peer: Optional[int]) -> None:
        """Check a call that is about to be made. A collective is compared at once, waiting for all ranks; a sender
        sends its description to the receiver, which compares when it takes the message (:meth:`message`).

        Args:
            signature: data type and shape, and of a message its iteration; they must agree. The calling line need not.
            peer: the other rank of a message, or a broadcast's root.

        Raises:
            CallsDisagree: on all ranks, with each rank's call.
        """
        site = _caller()
        if operation == SEND:
            assert peer is not None
            self._sent = [request for request in self._sent if not request[0].Test()]
            packed = _packed(f"{signature}\n{site}")
            self._sent.append((self._handle.Isend(packed, peer), packed))
        elif operation == RECEIVE:
            assert peer is not None
            received = np.zeros(_TEXT_SIZE, dtype=np.uint8)
            self._message = MessageCheck(self, self._handle.Irecv(received, peer), received, signature, site, peer)
        else:
            self._collective(f"{operation} of {signature}" + (f" from {peer}" if peer is not None else ""), site)

    def message(self) -> Optional["MessageCheck"]:
        """Take the check of the receive that was started last, if any."""
        message, self._message = self._message, None
        return message

    def _collective(self, call: str, site: str) -> None:
        own_text = _packed(f"{call}\n{site}")
        gathered = np.zeros((len(self._members), _TEXT_SIZE), dtype=np.uint8)
        self._wait(self._handle.Iallgather(own_text, gathered))
        texts = [_unpacked(text) for text in gathered]
        if len({text.partition("\n")[0] for text in texts}) == 1:
            return
        ranks_by_call: Dict[str, List[int]] = {}
        for rank, text in zip(self._members, texts):
            ranks_by_call.setdefault(text.replace("\n", " at "), []).append(rank)
        calls = "; ".join(f"rank {spans(ranks)}: {text}" for text, ranks in ranks_by_call.items())
        raise CallsDisagree(f"communicator {self._name}: the ranks do not make the same call: {calls}")


class MessageCheck:
    """A receiver's side of one message."""

    def __init__(
        self,
        check: CallCheck,
        request: MPI.Request,
        received: "np.ndarray[Any, Any]",
        signature: str,
        site: str,
        peer: int,
    ) -> None:
        self._check = check
        self._request = request
        self._received = received
        self._signature = signature
        self._site = site
        self._peer = peer

    def compare(self, blocking: bool) -> bool:
        """Whether the sender's description has arrived; it is then compared.

        Raises:
            CallsDisagree: it sends another shape or type than this rank expects.
        """
        if blocking:
            self._check._wait(self._request)
        elif not self._request.Test():
            return False
        sent_signature, _, site = _unpacked(self._received).partition("\n")
        if sent_signature != self._signature:
            receiver, sender = self._check._members[self._check._handle.Get_rank()], self._check._members[self._peer]
            raise CallsDisagree(
                f"communicator {self._check._name}: rank {receiver} waits for a message of {self._signature} "
                f"at {self._site}, "
                f"but rank {sender} sends {sent_signature} at {site}"
            )
        return True


def _caller() -> str:
    """The ``file:line`` of the call into this package."""
    frame = sys._getframe(1)
    while frame.f_back is not None and os.path.dirname(os.path.abspath(frame.f_code.co_filename)) == _PACKAGE_DIR:
        frame = frame.f_back
    return f"{'/'.join(frame.f_code.co_filename.split('/')[-2:])}:{frame.f_lineno}"


def _packed(text: str) -> "np.ndarray[Any, Any]":
    data = text.encode("utf-8")[:_TEXT_SIZE]
    return np.frombuffer(data.ljust(_TEXT_SIZE, b"\0"), dtype=np.uint8)


def _unpacked(data: "np.ndarray[Any, Any]") -> str:
    return bytes(data.tobytes()).rstrip(b"\0").decode("utf-8", "replace")

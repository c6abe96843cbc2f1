"""The process that keeps the jobs: answers the commands and moves the jobs on, until it is told to stop."""

from __future__ import annotations

import contextlib
import json
import os
import selectors
import signal as signals
import socket
import sys
import time
import traceback
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Callable, Dict, List, Optional, Union

import psutil

from fugaku_gpt.simulator.call import Call, Pending, Reply
from fugaku_gpt.simulator.control import pjdel, pjhold, pjrls, pjwait
from fugaku_gpt.simulator.core import Core
from fugaku_gpt.simulator.faults import Faults
from fugaku_gpt.simulator.limits import pjacl
from fugaku_gpt.simulator.orders import order
from fugaku_gpt.simulator.pjstat import pjstat
from fugaku_gpt.simulator.settings import Settings, read_settings
from fugaku_gpt.simulator.spool import Spool
from fugaku_gpt.simulator.submit import pjsub
from fugaku_gpt.simulator.table import Table

IDLE_SECONDS = 0.5  # between two looks at the owner while nothing is to do
_LONGEST = 256 * 2**20  # bytes of a call: a script on standard input and an environment are far below


@dataclass
class _Client:
    """One connection: a line comes, a line goes."""

    connection: socket.socket
    received: bytearray = field(default_factory=bytearray)
    pending: Optional[Pending] = None
    reply: Optional[Reply] = None
    due: float = 0.0


class Daemon:
    """The loop. Single-threaded: whatever a command sees is one moment."""

    def __init__(self, spool: Spool, settings: Settings) -> None:
        self.settings = settings
        self.table = Table(spool)
        self.core = Core(self.table, settings, Faults())
        self.stopping = False
        self._selector = selectors.DefaultSelector()
        self._clients: List[_Client] = []
        self._owner = _process(settings.owner)
        self._looked = 0.0

    def serve(self, listener: socket.socket) -> None:
        """Until ``stop`` is ordered, SIGTERM comes, or the owner or the folder is gone."""
        listener.setblocking(False)
        self._selector.register(listener, selectors.EVENT_READ, None)
        busy = True
        while not self.stopping:
            waiting = bool(self._clients)
            for key, _ in self._selector.select(self.settings.tick if busy or waiting else IDLE_SECONDS):
                if key.data is None:
                    self._accept(listener)
                else:
                    self._receive(key.data)
            try:
                busy = self.core.step()
            except FileNotFoundError:
                if self._folder_is_there():
                    raise
            self._answer_pending()
            self._look_around()
        if self._folder_is_there():
            self.core.end_all()
        else:
            self.core.abandon()
        self._answer_pending(final=True)

    def _folder_is_there(self) -> bool:
        return self.table.spool.settings.exists()

    def _look_around(self) -> None:
        """End where nobody could end this daemon any more: its owner or its folder is gone."""
        now = time.monotonic()
        if now - self._looked < IDLE_SECONDS:
            return
        self._looked = now
        owner = self._owner
        if owner is not None and (not owner.is_running() or owner.status() == psutil.STATUS_ZOMBIE):
            print("the process that started this simulator is gone: ending", file=sys.stderr, flush=True)
            self.stopping = True
        if not self._folder_is_there():
            print("the simulator's folder is gone: ending", file=sys.stderr, flush=True)
            self.stopping = True

    def _accept(self, listener: socket.socket) -> None:
        with contextlib.suppress(BlockingIOError):
            connection, _ = listener.accept()
            connection.setblocking(False)
            client = _Client(connection)
            self._clients.append(client)
            self._selector.register(connection, selectors.EVENT_READ, client)

    def _receive(self, client: _Client) -> None:
        try:
            data = client.connection.recv(1 << 20)
        except BlockingIOError:
            return
        except OSError:
            data = b""
        if not data or len(client.received) > _LONGEST:
            self._close(client)
            return
        client.received += data
        if not client.received.endswith(b"\n") or client.pending is not None or client.reply is not None:
            return
        try:
            outcome = self._dispatch(client.received)
        except Exception:  # a fault of ours must not take the jobs down: told in full, in the log and to the caller
            traceback.print_exc()
            sys.stderr.flush()
            outcome = Reply(err=f"simulator: internal error:\n{traceback.format_exc()}", code=1)
        if isinstance(outcome, Reply):
            self._set_reply(client, outcome)
        else:
            client.pending = outcome

    def _dispatch(self, received: bytearray) -> Union[Reply, Pending]:
        values = json.loads(received.decode("utf-8", "surrogateescape"))
        call = Call(**values)
        commands: Dict[str, Callable[[], Union[Reply, Pending]]] = {
            "pjsub": lambda: pjsub(call, self.table, self.settings, self.core.faults),
            "pjstat": lambda: pjstat(call, self.table, self.settings, self.core.faults),
            "pjdel": lambda: pjdel(call, self.core),
            "pjhold": lambda: pjhold(call, self.core),
            "pjrls": lambda: pjrls(call, self.core),
            "pjwait": lambda: pjwait(call, self.core),
            "pjacl": lambda: pjacl(call, self.settings),
            "order": lambda: order(call, self.core),
        }
        if call.command == "order" and call.words[:1] == ["stop"]:
            self.stopping = True
            return lambda: None  # answered when everything has ended
        return commands[call.command]()

    def _set_reply(self, client: _Client, reply: Reply) -> None:
        client.pending = None
        client.reply = reply
        client.due = time.monotonic() + reply.delay

    def _answer_pending(self, final: bool = False) -> None:
        for client in list(self._clients):
            if client.pending is not None:
                reply = client.pending()
                if reply is None and final:
                    reply = Reply()
                if reply is not None:
                    self._set_reply(client, reply)
            if client.reply is not None and (final or time.monotonic() >= client.due):
                self._send(client, client.reply)

    def _send(self, client: _Client, reply: Reply) -> None:
        text = json.dumps(reply.to_values()) + "\n"
        with contextlib.suppress(OSError):  # it has gone: nobody to tell
            client.connection.settimeout(10.0)
            client.connection.sendall(text.encode("utf-8", "surrogateescape"))
        self._close(client)

    def _close(self, client: _Client) -> None:
        self._selector.unregister(client.connection)
        client.connection.close()
        self._clients.remove(client)


def _process(pid: int) -> Optional[psutil.Process]:
    """A process as it is now: another one that gets its number later is not taken for it."""
    if pid == 0:
        return None
    return psutil.Process(pid)


def listen(spool: Spool) -> socket.socket:
    """The daemon's socket. It is bound from inside the folder, for a socket's path may have no more than 107 bytes."""
    listener = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
    with contextlib.suppress(FileNotFoundError):
        spool.socket.unlink()  # a killed daemon's
    os.chdir(spool.root)
    before = os.umask(0o177)
    try:
        listener.bind(spool.socket.name)
    finally:
        os.umask(before)
    listener.listen(64)
    return listener


def main(root: str) -> int:
    """Run a daemon in the folder; 0 when it was told to stop, 1 where another one is there."""
    spool = Spool(Path(root))
    settings = read_settings(spool.settings)
    try:
        with spool.held():
            daemon = Daemon(spool, settings)

            def stop(number: int, frame: Any) -> None:
                daemon.stopping = True

            signals.signal(signals.SIGTERM, stop)
            signals.signal(signals.SIGINT, signals.SIG_IGN)
            signals.signal(signals.SIGHUP, signals.SIG_IGN)
            recovered = daemon.core.recover()
            if recovered:
                print(f"{recovered} jobs of a killed simulator ended", file=sys.stderr, flush=True)
            listener = listen(spool)
            try:
                daemon.serve(listener)
            finally:
                listener.close()
                with contextlib.suppress(FileNotFoundError):  # with the whole folder
                    spool.socket.unlink()
    except BlockingIOError:
        print(f"{root}: a simulator runs there already", file=sys.stderr)
        return 1
    return 0

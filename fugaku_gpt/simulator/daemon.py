"""The simulator's daemon: it replies to commands and advances the jobs until it is ordered to stop."""

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

from fugaku_gpt.json_text import parse_json
from fugaku_gpt.simulator.control import pjdel, pjhold, pjrls, pjwait
from fugaku_gpt.simulator.faults import Faults
from fugaku_gpt.simulator.job_manager import JobManager
from fugaku_gpt.simulator.limits import pjacl
from fugaku_gpt.simulator.orders import execute_order
from fugaku_gpt.simulator.pjstat import pjstat
from fugaku_gpt.simulator.protocol import DeferredReply, Invocation, Reply
from fugaku_gpt.simulator.settings import Settings, read_settings
from fugaku_gpt.simulator.spool import Spool
from fugaku_gpt.simulator.submit import pjsub
from fugaku_gpt.simulator.table import JobTable

IDLE_SECONDS = 0.5  # between two checks of the owner while there is no work
_MAX_REQUEST_BYTES = 256 * 2**20  # a script on standard input and an environment are far smaller


@dataclass
class _Client:
    """One connection: one line is received, one line is sent."""

    connection: socket.socket
    received: bytearray = field(default_factory=bytearray)
    pending: Optional[DeferredReply] = None
    reply: Optional[Reply] = None
    due_time: float = 0.0


class Daemon:
    """The event loop. It has a single thread, so that every command sees a consistent state."""

    def __init__(self, spool: Spool, settings: Settings) -> None:
        self.settings = settings
        self.table = JobTable(spool)
        self.job_manager = JobManager(self.table, settings, Faults())
        self.is_stopping = False
        self._selector = selectors.DefaultSelector()
        self._clients: List[_Client] = []
        self._owner = _process_of(settings.owner)
        self._last_check = 0.0

    def serve(self, listener: socket.socket) -> None:
        """Serve until ``stop`` is ordered, SIGTERM arrives, or the owner or the folder is gone."""
        listener.setblocking(False)
        self._selector.register(listener, selectors.EVENT_READ, None)
        has_work = True
        while not self.is_stopping:
            has_clients = bool(self._clients)
            for key, _ in self._selector.select(self.settings.tick if has_work or has_clients else IDLE_SECONDS):
                if key.data is None:
                    self._accept(listener)
                else:
                    self._receive(key.data)
            try:
                has_work = self.job_manager.advance_jobs()
            except FileNotFoundError:
                if self._folder_exists():
                    raise
            self._answer_pending()
            self._check_owner_and_folder()
        if self._folder_exists():
            self.job_manager.end_all_jobs()
        else:
            self.job_manager.abandon_jobs()
        self._answer_pending(final=True)

    def _folder_exists(self) -> bool:
        return self.table.spool.settings.exists()

    def _check_owner_and_folder(self) -> None:
        """Stop when nobody could stop this daemon any more, since its owner or its folder is gone."""
        monotonic_time = time.monotonic()
        if monotonic_time - self._last_check < IDLE_SECONDS:
            return
        self._last_check = monotonic_time
        owner = self._owner
        if owner is not None and (not owner.is_running() or owner.status() == psutil.STATUS_ZOMBIE):
            print("the process that started this simulator is gone: ending", file=sys.stderr, flush=True)
            self.is_stopping = True
        if not self._folder_exists():
            print("the simulator's folder is gone: ending", file=sys.stderr, flush=True)
            self.is_stopping = True

    def _accept(self, listener: socket.socket) -> None:
        with contextlib.suppress(BlockingIOError):
            connection, _ = listener.accept()
            connection.setblocking(False)
            client = _Client(connection)
            self._clients.append(client)
            self._selector.register(connection, selectors.EVENT_READ, client)

    def _receive(self, client: _Client) -> None:
        try:
            chunk = client.connection.recv(1 << 20)
        except BlockingIOError:
            return
        except OSError:
            chunk = b""
        if not chunk or len(client.received) > _MAX_REQUEST_BYTES:
            self._close(client)
            return
        client.received += chunk
        if not client.received.endswith(b"\n") or client.pending is not None or client.reply is not None:
            return
        try:
            response = self._execute(client.received)
        except Exception:  # an internal error must not end the jobs: the log and the caller get all of it
            traceback.print_exc()
            sys.stderr.flush()
            response = Reply(err=f"simulator: internal error:\n{traceback.format_exc()}", code=1)
        if isinstance(response, Reply):
            self._set_reply(client, response)
        else:
            client.pending = response

    def _execute(self, received: bytearray) -> Union[Reply, DeferredReply]:
        values = parse_json(received.decode("utf-8", "surrogateescape"))
        invocation = Invocation(**values)
        commands: Dict[str, Callable[[], Union[Reply, DeferredReply]]] = {
            "pjsub": lambda: pjsub(invocation, self.table, self.settings, self.job_manager.faults),
            "pjstat": lambda: pjstat(invocation, self.table, self.settings, self.job_manager.faults),
            "pjdel": lambda: pjdel(invocation, self.job_manager),
            "pjhold": lambda: pjhold(invocation, self.job_manager),
            "pjrls": lambda: pjrls(invocation, self.job_manager),
            "pjwait": lambda: pjwait(invocation, self.job_manager),
            "pjacl": lambda: pjacl(invocation, self.settings),
            "order": lambda: execute_order(invocation, self.job_manager),
        }
        if invocation.command == "order" and invocation.arguments[:1] == ["stop"]:
            self.is_stopping = True
            return lambda: None  # the reply is sent when everything has ended
        return commands[invocation.command]()

    def _set_reply(self, client: _Client, reply: Reply) -> None:
        client.pending = None
        client.reply = reply
        client.due_time = time.monotonic() + reply.delay

    def _answer_pending(self, final: bool = False) -> None:
        for client in list(self._clients):
            if client.pending is not None:
                reply = client.pending()
                if reply is None and final:
                    reply = Reply()
                if reply is not None:
                    self._set_reply(client, reply)
            if client.reply is not None and (final or time.monotonic() >= client.due_time):
                self._send(client, client.reply)

    def _send(self, client: _Client, reply: Reply) -> None:
        text = json.dumps(reply.to_values()) + "\n"
        with contextlib.suppress(OSError):  # the client has gone
            client.connection.settimeout(10.0)
            client.connection.sendall(text.encode("utf-8", "surrogateescape"))
        self._close(client)

    def _close(self, client: _Client) -> None:
        self._selector.unregister(client.connection)
        client.connection.close()
        self._clients.remove(client)


def _process_of(pid: int) -> Optional[psutil.Process]:
    """The process that has this pid today; a later process with the same pid is not mistaken for it."""
    if pid == 0:
        return None
    return psutil.Process(pid)


def listen(spool: Spool) -> socket.socket:
    """Open the daemon's socket, from inside the folder: the path of a socket is limited to 107 bytes."""
    listener = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
    with contextlib.suppress(FileNotFoundError):
        spool.socket.unlink()  # left by a killed daemon
    os.chdir(spool.root)
    previous_umask = os.umask(0o177)
    try:
        listener.bind(spool.socket.name)
    finally:
        os.umask(previous_umask)
    listener.listen(64)
    return listener


def main(root: str) -> int:
    """Run a daemon in the folder; return 0 after it was stopped, 1 if another daemon runs there."""
    spool = Spool(Path(root))
    settings = read_settings(spool.settings)
    try:
        with spool.locked():
            daemon = Daemon(spool, settings)

            def stop(signal_number: int, frame: Any) -> None:
                daemon.is_stopping = True

            signals.signal(signals.SIGTERM, stop)
            signals.signal(signals.SIGINT, signals.SIG_IGN)
            signals.signal(signals.SIGHUP, signals.SIG_IGN)
            ended_jobs = daemon.job_manager.recover()
            if ended_jobs:
                print(f"{ended_jobs} jobs of a killed simulator ended", file=sys.stderr, flush=True)
            listener = listen(spool)
            try:
                daemon.serve(listener)
            finally:
                listener.close()
                with contextlib.suppress(FileNotFoundError):  # removed with the folder
                    spool.socket.unlink()
    except BlockingIOError:
        print(f"{root}: a simulator runs there already", file=sys.stderr)
        return 1
    return 0

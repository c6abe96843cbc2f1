"""Serves the live page of runs to browsers of this machine.

It listens on 127.0.0.1 alone, answers those who know the token in the URL, and has nothing that changes anything. A
request whose Host is another name than this machine's is refused: so a page from elsewhere that a browser was led here
with cannot read an answer. The port in Host may be any, since an ssh tunnel has its own.
"""

from __future__ import annotations

import contextlib
import hmac
import queue
import re
import secrets
import socket
import sys
import threading
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any, Iterator, Optional
from urllib.parse import parse_qs, urlsplit

from fugaku_gpt.errors import UsageError
from fugaku_gpt.report.live_runs import LiveRuns
from fugaku_gpt.report.page_runs import seconds_between_looks
from fugaku_gpt.report.run_page import page_frame, policy_of, render_page

ADDRESS = "127.0.0.1"
_HOST = re.compile(r"(127\.0\.0\.1|localhost)(:[0-9]{1,5})?", re.IGNORECASE)
_MOST_CONNECTIONS, _MOST_READERS = 32, 16
_SOCKET_SECONDS = 20.0  # after which a connection that neither sends nor takes anything is closed
_HEARTBEAT_SECONDS = 10.0


class LiveServer:
    """A server of one live page.

    Attributes:
        runs: the runs that it shows.
        token: secret of its URL.
        port: the port on which it listens.
    """

    def __init__(self, runs: LiveRuns, port: int = 0, interval: float = 1.0) -> None:
        """Listen on a port; 0 picks a free one.

        Args:
            interval: seconds between looks at the runs, at least.

        Raises:
            UsageError: the port cannot be used.
        """
        self.runs, self.token, self._interval = runs, secrets.token_urlsafe(32), interval
        try:
            self._http = _HTTPServer(self, (ADDRESS, port))
        except OSError as error:
            raise UsageError(f"--port {port}: {error.strerror}; choose another, or 0 for any free one") from None
        self.port = int(self._http.server_address[1])
        self.readers = threading.BoundedSemaphore(_MOST_READERS)
        self._is_over, self._wake = threading.Event(), threading.Event()
        self._threads = [
            threading.Thread(target=self._http.serve_forever, kwargs={"poll_interval": 0.1}, daemon=True),
            threading.Thread(target=self._poll_runs, daemon=True),
        ]
        self.failure: Optional[BaseException] = None

    @property
    def url(self) -> str:
        """The page, with its token."""
        return f"http://{ADDRESS}:{self.port}/?token={self.token}"

    @contextlib.contextmanager
    def serving(self) -> Iterator[None]:
        """Answer requests while the context is open; at its end all streams of events have got their end."""
        for thread in self._threads:
            thread.start()
        try:
            yield
        finally:
            self._is_over.set()
            self._wake.set()
            self.runs.end()
            self._http.shutdown()
            self._http.server_close()
            for thread in self._threads:
                thread.join()

    def wait(self) -> None:
        """Wait until the server is over, which is at an error of its own.

        Raises:
            BaseException: the error of the thread that looks at the runs.
        """
        while not self._is_over.wait(0.5):
            pass
        if self.failure is not None:
            raise self.failure

    def wake(self) -> None:
        """Look at the runs at once: a reader waits for its first messages."""
        self._wake.set()

    def _poll_runs(self) -> None:
        try:
            while not self._is_over.is_set():
                self._wake.clear()
                self.runs.poll()
                self._wake.wait(max(self._interval, seconds_between_looks(len(self.runs))))
        except BaseException as error:  # wait() raises it in the thread that can report it
            self.failure = error
            self._is_over.set()


class _HTTPServer(ThreadingHTTPServer):
    """A server with a bounded number of connections."""

    daemon_threads = True
    block_on_close = False
    request_queue_size = 16

    def __init__(self, live: LiveServer, address: Any) -> None:
        self.live = live
        self._connections = threading.BoundedSemaphore(_MOST_CONNECTIONS)
        super().__init__(address, _Handler)

    def process_request(self, request: Any, client_address: Any) -> None:
        """Answer in a thread of its own, unless there are too many connections: one more is closed."""
        if self._connections.acquire(blocking=False):
            super().process_request(request, client_address)
        else:
            self.shutdown_request(request)

    def process_request_thread(self, request: Any, client_address: Any) -> None:
        """Answer, and make room for another connection."""
        try:
            super().process_request_thread(request, client_address)
        finally:
            self._connections.release()

    def handle_error(self, request: Any, client_address: Any) -> None:
        """Report errors, but for those of a connection that the browser has closed, or that is too slow."""
        if not isinstance(sys.exc_info()[1], (ConnectionError, socket.timeout)):
            super().handle_error(request, client_address)


class _Handler(BaseHTTPRequestHandler):
    """Answers one request."""

    server: _HTTPServer
    server_version, sys_version = "fugaku_gpt", ""
    timeout = _SOCKET_SECONDS

    def do_GET(self) -> None:
        """Send the page or its events."""
        live = self.server.live
        if not _HOST.fullmatch(self.headers.get("Host") or ""):
            self._refuse(421, "this server answers as 127.0.0.1 and localhost only")
            return
        try:
            address = urlsplit(self.path)
            token = parse_qs(address.query).get("token", [""])[0]
        except ValueError:
            self._refuse(400, "this is no address of a page")
            return
        if not hmac.compare_digest(token.encode("utf-8", "replace"), live.token.encode("ascii")):
            self._refuse(403, "the token in the URL is not that of this server; use the URL that it has printed")
        elif address.path == "/":
            self._send_page()
        elif address.path == "/events":
            self._send_events()
        else:
            self._refuse(404, "there is no such page here")

    def log_message(self, format: str, *args: Any) -> None:
        """Log nothing: a request's line has the token."""

    def _refuse(self, code: int, text: str) -> None:
        content = f"{text}\n".encode()
        self._send_head(code, "text/plain; charset=utf-8", len(content))
        self.wfile.write(content)

    def _send_head(
        self, code: int, kind: str, length: Optional[int] = None, policy: str = "default-src 'none'"
    ) -> None:
        self.send_response(code)
        headers = {
            "Content-Type": kind,
            "Cache-Control": "no-store",
            "Content-Security-Policy": f"{policy}; frame-ancestors 'none'",
            "Cross-Origin-Resource-Policy": "same-origin",
            "Referrer-Policy": "no-referrer",
            "X-Content-Type-Options": "nosniff",
            "X-Frame-Options": "DENY",
        }
        for name, value in headers.items():
            self.send_header(name, value)
        if length is not None:
            self.send_header("Content-Length", str(length))
        self.end_headers()

    def _send_page(self) -> None:
        content = render_page({**page_frame(), "live": True}).encode("utf-8")
        self._send_head(200, "text/html; charset=utf-8", len(content), policy_of(is_live=True))
        self.wfile.write(content)

    def _send_events(self) -> None:
        live = self.server.live
        if not live.readers.acquire(blocking=False):
            self._refuse(503, f"{_MOST_READERS} pages are open; close one")
            return
        reader = live.runs.join()
        try:
            live.wake()
            self._send_head(200, "text/event-stream; charset=utf-8")
            while not reader.is_dropped:
                try:
                    message = reader.messages.get(timeout=_HEARTBEAT_SECONDS)
                except queue.Empty:
                    message = b":\n\n"  # a comment: else nobody notices that the browser is gone
                if message is None:
                    return
                self.wfile.write(message)
        finally:
            live.runs.leave(reader)
            live.readers.release()

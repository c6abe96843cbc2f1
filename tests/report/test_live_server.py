"""Tests of the live page over real HTTP: who gets an answer, what is sent when runs change, and how it ends."""

from __future__ import annotations

import contextlib
import http.client
import json
import os
import shutil
import socket
import threading
import time
from dataclasses import replace
from pathlib import Path
from typing import Any, Dict, Iterator, List, Tuple

import psutil
import pytest

from fugaku_gpt.errors import UsageError
from fugaku_gpt.records.metrics import MetricsWriter
from fugaku_gpt.report import live_server
from fugaku_gpt.report.dashboard import Dashboard
from fugaku_gpt.report.live_runs import LiveRuns, Reader
from fugaku_gpt.report.live_server import LiveServer
from fugaku_gpt.report.page_runs import GanttPicture
from tests.report.page_runs import STEP, page_lines, write_page_run
from tests.report.traces import write_rank
from tests.support.killed_run import DEAD, killed_run

SECONDS = 60.0  # nothing waits so long unless it is broken


@pytest.fixture
def runs(tmp_path: Path) -> Path:
    """A folder of one run."""
    write_page_run(tmp_path / "runs" / "a", lines=3)
    return tmp_path / "runs"


@contextlib.contextmanager
def serving(*folders: Path) -> Iterator[LiveServer]:
    """A server that looks at runs often."""
    server = LiveServer(LiveRuns(folders), interval=0.02)
    with server.serving():
        yield server


def request(
    server: LiveServer, path: str, headers: "Dict[str, str] | None" = None, method: str = "GET"
) -> http.client.HTTPResponse:
    """The answer to one request."""
    connection = http.client.HTTPConnection("127.0.0.1", server.port, timeout=SECONDS)
    connection.request(method, path, headers=headers or {})
    return connection.getresponse()


class Events:
    """A stream of server-sent events."""

    def __init__(self, server: LiveServer) -> None:
        self.response = request(server, f"/events?token={server.token}")
        assert self.response.status == 200
        assert self.response.getheader("Content-Type") == "text/event-stream; charset=utf-8"

    def next(self) -> Tuple[str, Any]:
        """The next event: its name and its data."""
        name = ""
        deadline = time.monotonic() + SECONDS  # heartbeats still come where no event does
        while time.monotonic() < deadline:
            line = self.response.readline().decode()
            assert line, "the stream has ended"
            if line.startswith("event: "):
                name = line[7:].strip()
            elif line.startswith("data: "):
                return name, json.loads(line[6:])
        raise TimeoutError("no event")

    def until(self, name: str) -> Any:
        """The data of the next event of this name."""
        while True:
            event, value = self.next()
            if event == name:
                return value


@pytest.mark.parametrize(
    ("path", "headers", "code"),
    [
        ("/?token={token}", {}, 200),
        ("/?token={token}", {"Host": "localhost:8080"}, 200),  # through an ssh tunnel
        ("/", {}, 403),
        ("/events", {}, 403),
        ("/?token=", {}, 403),
        ("/?token={token}x", {}, 403),
        ("/?token=%F0%9F%98%80", {}, 403),
        ("/?token={token}", {"Host": "evil.example"}, 421),
        ("/?token={token}", {"Host": "127.0.0.1.evil.example"}, 421),
        ("/metrics.jsonl?token={token}", {}, 404),
        ("/../a/metrics.jsonl?token={token}", {}, 404),
    ],
)
def test_who_knows_the_token_and_asks_this_machine_is_answered(
    runs: Path, path: str, headers: Dict[str, str], code: int
) -> None:
    with serving(runs) as server:
        response = request(server, path.format(token=server.token), headers)
        text = response.read().decode()
        assert response.status == code
        assert ("runPage" in text) == (code == 200) and (server.token in text) is False
        assert response.getheader("Cache-Control") == "no-store"
        assert "frame-ancestors 'none'" in str(response.getheader("Content-Security-Policy"))


@pytest.mark.parametrize(
    ("sent", "code"),
    [
        (b"GET http://[/ HTTP/1.1\r\nHost: localhost\r\n\r\n", 400),
        (b"GET / HTTP/1.1\r\n\r\n", 421),
        (b"\xff\x00\r\n\r\n", 400),
    ],
)
def test_requests_of_no_browser_are_refused(
    runs: Path, sent: bytes, code: int, capfd: pytest.CaptureFixture[str]
) -> None:
    with serving(runs) as server:
        with socket.create_connection(("127.0.0.1", server.port), SECONDS) as connection:
            connection.sendall(sent)
            answer = connection.makefile("rb").read()
        assert str(code).encode() in answer
        assert request(server, f"/?token={server.token}").status == 200
    assert capfd.readouterr().err == ""


@pytest.mark.parametrize("method", ["POST", "PUT", "DELETE", "OPTIONS"])
def test_nothing_can_be_changed(runs: Path, method: str) -> None:
    with serving(runs) as server:
        assert request(server, f"/?token={server.token}", method=method).status == 501


def test_it_listens_on_loopback_alone_and_each_server_has_another_token(runs: Path) -> None:
    with serving(runs) as server, serving(runs) as other:
        assert server._http.server_address[0] == "127.0.0.1"
        assert server.token != other.token and len(server.token) >= 32 and server.port != other.port
        assert request(other, f"/?token={server.token}").status == 403


def test_a_page_gets_all_runs_and_then_the_changes(runs: Path) -> None:
    with serving(runs) as server:
        events = Events(server)
        (first,) = events.until("begin")
        run = events.until("run")
        assert (run["id"], run["name"], run["status"]) == (first, "a", "ok")
        assert run["curves"]["loss"]["steps"] == [STEP] * 3 and "after" not in run["curves"]["loss"]
        writer = MetricsWriter(runs / "a" / "metrics.jsonl")
        more = [line for line in page_lines(5, 1e-3, 1) if line["iteration"] > 3 * STEP]
        writer.write("iteration", more[0])
        loss = events.until("update")["curves"]["loss"]
        assert (loss["steps"], loss["after"]) == ([4 * STEP], 3 * STEP)
        assert loss["values"] == [pytest.approx(more[0]["loss"], rel=1e-8)]
        writer.write("resumed", {"iteration": STEP, "checkpoint": "step-5"})
        update = events.until("update")
        assert update["curves"]["loss"] == {"steps": [], "values": [], "after": STEP}
        assert update["head"]["events"] == [[STEP, "resumed from step-5"]]
        writer.close()


def test_runs_that_appear_end_and_are_removed_are_reported(tmp_path: Path) -> None:
    (tmp_path / "runs").mkdir()
    with serving(tmp_path / "runs") as server:
        events = Events(server)
        assert events.until("begin") == []
        run = write_page_run(tmp_path / "runs" / "b", lines=2)
        (run.path / "result.json").rename(tmp_path / "result.json")
        appeared = events.until("run")
        assert appeared["name"] == "b"
        shutil.copy(tmp_path / "result.json", run.path / "result.json")
        statuses: List[str] = []
        while "ok" not in statuses:
            statuses.append(events.until("update")["head"]["status"])
        write_page_run(tmp_path / "runs" / "c", lines=2, lr=5e-4)
        differs = events.until("differences")
        while len(differs) < 2 or not all(differs.values()):
            differs = events.until("differences")
        assert differs[appeared["id"]] == [["lr", "0.001"]]
        shutil.rmtree(run.path)
        assert events.until("remove") == appeared["id"]


def test_a_damaged_run_neither_ends_the_server_nor_hides_another(runs: Path) -> None:
    bad = write_page_run(runs / "bad", lines=2)
    with serving(runs) as server:
        events = Events(server)
        events.until("begin")
        (bad.path / "config.yaml").write_text("model: [")
        (bad.path / "result.json").write_text("[]")
        bad.metrics_file.write_text("nothing\nof JSON\n")
        heads = [events.until("update")["head"]]
        while not (heads[-1]["name"] == "bad" and len(heads[-1]["problems"]) >= 2):
            heads.append(events.until("update")["head"])
        writer = MetricsWriter(runs / "a" / "metrics.jsonl")
        writer.write("iteration", {"iteration": 4 * STEP, "loss": 1.25})
        writer.close()
        while events.until("update")["curves"].get("loss", {}).get("values") != [1.25]:
            pass
        assert server.failure is None


def test_a_page_that_is_opened_later_gets_thinned_curves_and_a_note(tmp_path: Path) -> None:
    write_page_run(tmp_path / "a", lines=5000)
    live = LiveRuns([tmp_path])
    live.poll()
    reader = live.join()
    live.poll()
    messages = [reader.messages.get_nowait() for _ in range(reader.messages.qsize())]
    run, notes = (
        json.loads(next(text for text in messages if text and text.startswith(start)).partition(b"data: ")[2])
        for start in (b"event: run", b"event: notes")
    )
    assert 3000 < len(run["curves"]["loss"]["values"]) <= 4000 and "4000 of a curve" in notes[0]


def test_a_folder_that_cannot_be_searched_is_named_and_runs_are_followed_all_the_same(
    runs: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with serving(runs) as server:
        events = Events(server)
        assert events.until("notes") == []

        def refuse(*_: object) -> Dict[Path, str]:
            raise PermissionError(13, "Permission denied", "/secret")

        monkeypatch.setattr("fugaku_gpt.report.live_runs.named_runs", refuse)
        assert events.until("notes") == ["Other runs cannot be looked for: /secret: Permission denied."]
        writer = MetricsWriter(runs / "a" / "metrics.jsonl")
        writer.write("iteration", {"iteration": 4 * STEP, "loss": 1.25})
        writer.close()
        assert events.until("update")["curves"]["loss"]["values"] == [1.25]


def test_more_runs_than_are_followed_are_counted(runs: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("fugaku_gpt.report.live_runs.MOST_RUNS_FOLLOWED", 1)
    with serving(runs) as server:
        events = Events(server)
        assert events.until("notes") == []
        write_page_run(runs / "b", lines=1)
        assert events.until("notes") == ["1 of 2 runs are followed."]


def test_connections_are_bounded_and_closing_makes_room(runs: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(live_server, "_MOST_READERS", 2)
    monkeypatch.setattr(live_server, "_HEARTBEAT_SECONDS", 0.05)
    with serving(runs) as server:
        open_pages = [Events(server), Events(server)]
        refused = request(server, f"/events?token={server.token}")
        assert refused.status == 503 and "close one" in refused.read().decode()
        open_pages[0].response.close()
        while request(server, f"/events?token={server.token}").status != 200:
            pass


def test_more_connections_than_the_server_has_room_for_are_closed(runs: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(live_server, "_MOST_CONNECTIONS", 3)
    with serving(runs) as server, contextlib.ExitStack() as stack:
        silent = [stack.enter_context(socket.create_connection(("127.0.0.1", server.port), SECONDS)) for _ in range(3)]
        with pytest.raises((http.client.BadStatusLine, ConnectionError)):
            request(server, f"/?token={server.token}")
        silent[0].close()
        while True:
            with contextlib.suppress(http.client.BadStatusLine, ConnectionError):
                assert request(server, f"/?token={server.token}").status == 200
                break


def test_the_end_is_sent_to_open_pages(runs: Path) -> None:
    with serving(runs) as server:
        events = Events(server)
        events.until("begin")
    assert events.until("end") is None
    assert events.response.read() == b"\n"  # of the last event
    with pytest.raises(ConnectionError):
        request(server, "/")


def test_a_picture_is_sent_with_new_facts_and_not_with_each_line(runs: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("fugaku_gpt.report.live_runs.gantt_picture", lambda path, _: GanttPicture("data:,", path.name))
    live = LiveRuns([runs])
    live.poll()
    reader = live.join()
    live.poll()
    while not reader.messages.empty():
        reader.messages.get_nowait()
    with open(runs / "a" / "metrics.jsonl", "a") as stream:
        stream.write(f'{{"kind": "iteration", "iteration": {4 * STEP}, "loss": 1.0}}\n')
    live.poll()
    (update,) = [reader.messages.get_nowait() for _ in range(reader.messages.qsize())]
    assert update is not None and b'"loss"' in update and b"gantt" not in update


def newest_updates(live: LiveRuns, reader: Reader) -> List[Dict[str, Any]]:
    """The updates that a look at the runs sends to a reader."""
    while not reader.messages.empty():
        reader.messages.get_nowait()
    live.poll()
    messages = [reader.messages.get_nowait() or b"" for _ in range(reader.messages.qsize())]
    prefix = b"event: update\ndata: "
    return [json.loads(message[len(prefix) :]) for message in messages if message.startswith(prefix)]


def test_iterations_that_are_left_out_are_sent_though_no_curve_has_changed(runs: Path) -> None:
    live = LiveRuns([runs])
    reader = live.join()
    live.poll()
    writer = MetricsWriter(runs / "a" / "metrics.jsonl")
    writer.write("left_out", {"iteration": 4 * STEP, "why": "not finite"})
    writer.close()
    (update,) = newest_updates(live, reader)
    assert update["head"]["events"] == [[4 * STEP, "left out: not finite"]] and update["curves"] == {}
    assert newest_updates(live, reader) == []


def test_nothing_is_sent_of_a_run_that_has_not_changed(runs: Path) -> None:
    killed_run(runs / "lives", replace(DEAD, process=os.getpid(), born=psutil.Process().create_time()))
    live = LiveRuns([runs])
    reader = live.join()
    live.poll()
    assert newest_updates(live, reader) == []


def test_page_and_terminal_agree_on_runs_without_an_end(tmp_path: Path) -> None:
    alive = replace(DEAD, process=os.getpid(), born=psutil.Process().create_time())
    killed_run(tmp_path / "a", alive)
    killed_run(tmp_path / "b", DEAD)
    killed_run(tmp_path / "c", replace(DEAD, host="another"))
    with serving(tmp_path) as server:
        events = Events(server)
        number = len(events.until("begin"))
        runs = [events.until("run") for _ in range(number)]
        on_page = {run["name"]: run["status"] for run in runs}
        while "lost" not in on_page.values():
            update = events.until("update")
            on_page[update["head"]["name"]] = update["head"]["status"]
    with Dashboard([tmp_path]) as dashboard:
        for _ in range(2):
            dashboard.look()
        on_terminal = {status.name: status.status for _, status in dashboard.statuses()}
    assert on_terminal == {"a": "running", "b": "lost", "c": "unfinished"}
    assert on_page == on_terminal


def test_pictures_are_bounded_and_a_run_beyond_the_bound_says_so(runs: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("fugaku_gpt.report.live_runs._MOST_PICTURES", 1)
    write_page_run(runs / "b", lines=1)
    for name in "ab":
        write_rank(runs / name / "trace", 0, [(0.0, "forward", 4, 0)])
    with serving(runs) as server:
        events = Events(server)
        events.until("begin")
        pictures = [events.until("run")["gantt"] for _ in "ab"]
    assert [bool(picture["image"]) for picture in pictures] == [True, False]
    assert "report trace" in pictures[1]["text"]


def test_a_reader_that_falls_behind_is_dropped(runs: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("fugaku_gpt.report.live_runs._QUEUE", 4)
    live = LiveRuns([runs])
    live.poll()
    slow, fast = live.join(), live.join()
    live.poll()
    for number in range(4, 10):
        while not fast.messages.empty():
            fast.messages.get_nowait()
        with open(runs / "a" / "metrics.jsonl", "a") as stream:
            stream.write(f'{{"kind": "iteration", "iteration": {number * STEP}, "loss": 1.0}}\n')
        live.poll()
    assert slow.is_dropped and slow.messages.qsize() == 4 and not fast.is_dropped


def test_a_folder_that_is_missing_and_a_port_in_use_are_refused(runs: Path) -> None:
    with pytest.raises(UsageError, match="none: no such folder"):
        LiveRuns([runs, runs / "none"])
    with serving(runs) as server, pytest.raises(UsageError, match=f"--port {server.port}: .*choose another"):
        LiveServer(LiveRuns([runs]), server.port)


def test_an_error_of_the_looks_at_runs_ends_the_wait(runs: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    live, seen = LiveRuns([runs]), threading.Event()

    def fail() -> None:
        seen.wait(SECONDS)
        raise MemoryError("no more")

    monkeypatch.setattr(live, "poll", fail)
    server = LiveServer(live, interval=0.02)
    with server.serving():
        with monkeypatch.context() as patch:
            waits: List[float] = []
            wait = server._is_over.wait

            def counted(seconds: float) -> bool:
                waits.append(seconds)
                if len(waits) > 1:
                    seen.set()
                return wait(seconds if len(waits) > 1 else 0)

            patch.setattr(server._is_over, "wait", counted)
            with pytest.raises(MemoryError, match="no more"):
                server.wait()
        assert len(waits) > 1  # it was not over at first

"""Tests of ``fugaku-gpt watch``: it prints its URL, serves the page, and ends at Ctrl-C."""

from __future__ import annotations

import http.client
import os
import signal
import subprocess
import sys
from pathlib import Path
from urllib.parse import urlsplit

import pytest

from fugaku_gpt.cli.main import run as command
from tests.report.page_runs import write_page_run
from tests.support.commands import Capture


@pytest.mark.slow
@pytest.mark.parametrize("end", [signal.SIGINT, signal.SIGTERM])
def test_it_serves_the_page_until_a_signal_and_ends_without_a_traceback(tmp_path: Path, end: signal.Signals) -> None:
    write_page_run(tmp_path / "runs" / "a", lines=2)
    process = subprocess.Popen(
        [sys.executable, "-m", "fugaku_gpt", "watch", str(tmp_path / "runs"), "--no-open"],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )
    try:
        assert process.stdout is not None
        address = urlsplit(process.stdout.readline().strip())
        assert (address.hostname, address.path) == ("127.0.0.1", "/")
        connection = http.client.HTTPConnection("127.0.0.1", address.port or 0, timeout=60)
        connection.request("GET", f"/events?{address.query}")
        response = connection.getresponse()
        assert response.readline() == b"event: begin\n"
        process.send_signal(end)
        output, errors = process.communicate(timeout=60)
    finally:
        process.kill()
    assert process.returncode == (0 if end == signal.SIGINT else -signal.SIGTERM)
    assert output == "" and "Traceback" not in errors
    assert f"ssh -L {address.port}:127.0.0.1:{address.port}" in errors


@pytest.mark.slow
def test_a_browser_gets_a_private_file_that_leads_to_the_page(tmp_path: Path) -> None:
    """Others see the arguments of a process, which must not have the token."""
    write_page_run(tmp_path / "runs" / "a", lines=1)
    seen = tmp_path / "seen"
    browser = tmp_path / "browser"
    browser.write_text(
        f'#!/bin/sh\nfile=${{1#file://}}\n{{ echo "$1"; stat -c %a "$(dirname "$file")"; cat "$file"; }} > {seen}.new\n'
        f"mv {seen}.new {seen}\nkill -INT $PPID\n"
    )
    browser.chmod(0o755)
    variables = {**os.environ, "DISPLAY": ":0", "BROWSER": f"{browser} %s"}
    command_line = [sys.executable, "-m", "fugaku_gpt", "watch", str(tmp_path / "runs")]
    ended = subprocess.run(command_line, env=variables, capture_output=True, text=True, timeout=120)
    url = ended.stdout.splitlines()[0]
    argument, mode, page = seen.read_text().splitlines()
    assert ended.returncode == 0 and "Traceback" not in ended.stderr
    assert argument.startswith("file:///") and url.partition("token=")[2] not in argument
    assert mode == "700" and url in page
    assert not Path(urlsplit(argument).path).exists()


def test_a_missing_folder_and_a_wrong_port_are_refused(tmp_path: Path, capsys: Capture) -> None:
    assert command(["watch", str(tmp_path / "none")]) == 2
    assert "none: no such folder" in capsys.readouterr().err
    assert command(["watch", str(tmp_path), "--port", "70000"]) == 2
    assert "70000 is not in the range" in capsys.readouterr().err

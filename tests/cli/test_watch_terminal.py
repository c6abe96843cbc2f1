"""Tests of ``fugaku-gpt watch --terminal`` on a real terminal, and where there is none."""

from __future__ import annotations

import signal
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Iterator

import pytest

from fugaku_gpt.cli.main import run
from fugaku_gpt.config import dump_run_config, load_run_config
from fugaku_gpt.records.metrics import MetricsWriter
from fugaku_gpt.records.run import OK, Result, RunDirectory
from tests.support.tmux import Terminal, has_tmux

COMMAND = (sys.executable, "-m", "fugaku_gpt", "watch")
HOSTILE = "\x1b]2;owned\x07\x1b[31mred[bold]"
on_a_terminal = pytest.mark.skipif(not has_tmux(), reason="tmux is not installed: watch --terminal was NOT tried")


class GrowingRun:
    """A run of 400 iterations that this process has claimed, and whose lines a test writes."""

    def __init__(self, path: Path) -> None:
        self.directory = RunDirectory(path)
        config = load_run_config(preset="tiny", overrides=["training.iterations=400", "layout.dp=2"])
        self.directory.create(dump_run_config(config))
        self._metrics = MetricsWriter(self.directory.metrics_file)

    def write(self, first: int, last: int, loss: float = 80.0) -> None:
        """Write lines of iterations."""
        for number in range(first, last + 1):
            figures = {"loss": loss - number / 10, "lr": 1e-3, "grad_norm": 0.5, "seconds": 2.0}
            rates = {"tokens_per_second": 2048.0, "tflops_notes": 0.25, "rss_max_bytes": 2**30}
            self._metrics.write("iteration", {"iteration": number, **figures, **rates})

    def resume(self, iteration: int) -> None:
        """Go back to an iteration."""
        self._metrics.write("resumed", {"iteration": iteration, "checkpoint": f"step-{iteration}"})

    def end(self) -> None:
        """Record a good end."""
        self.directory.write_result(Result(OK, "", 1.7e9, 1.7e9 + 80, 200, {}))


@pytest.fixture
def socket_folder() -> Iterator[Path]:
    with tempfile.TemporaryDirectory(prefix="tmux-") as folder:  # names of sockets have 100 bytes at most
        yield Path(folder)


@pytest.mark.slow
@on_a_terminal
def test_a_screen_follows_runs_that_grow_resume_and_end(tmp_path: Path, socket_folder: Path) -> None:
    (tmp_path / "runs").mkdir()
    with Terminal(socket_folder, [*COMMAND, str(tmp_path / "runs"), "--terminal"], 80, 24) as terminal:
        title = terminal.title()
        terminal.screen_when(lambda text: "no run yet" in text)
        growing = GrowingRun(tmp_path / "runs" / "growing")
        growing.write(1, 10)
        lines = terminal.screen_when(lambda text: "iteration 10/400" in text)
        assert lines[0] == "growing  running  2 ranks  iteration 10/400  ETA 0:13:00"
        assert lines[1] == "  █▇▆▆▅▄▃▃▂▁  loss 79"
        assert lines[2] == "  lr 1.00E-03  grad norm 0.5  2,048 tok/s  0.25 TFLOPs  1 GiB/rank"
        assert lines[4].endswith("Ctrl-C ends this, and stops no run") and lines[5:] == [""] * 19
        growing.write(11, 30)
        growing.resume(20)
        growing.write(21, 21, loss=90.0)
        lines = terminal.screen_when(lambda text: "iteration 21/400" in text)
        assert lines[1].endswith("loss 87.9") and lines[1].count("▁") > 0  # that of the line after the resumption
        other = GrowingRun(tmp_path / "runs" / HOSTILE)
        other.write(1, 3)
        lines = terminal.screen_when(lambda text: "iteration 3/400" in text)
        assert "\\x1b]2;owned\\x07\\x1b[31mred[bold]  running" in "\n".join(lines)
        terminal.resize(120, 24)
        growing.write(22, 200)
        growing.end()
        lines = terminal.screen_when(lambda text: "growing  ok  2 ranks  iteration 200/400" in text)
        assert lines.index("growing  ok  2 ranks  iteration 200/400") == 4  # below the one that still runs
        assert 115 < len(lines[5]) <= 120 and lines[5].endswith("  loss 60")  # the curve has what room there is
        terminal.press("C-c")
        assert terminal.exit_code() == 0 and terminal.title() == title
        text = "".join(terminal.screen())
        assert "growing | ok | 2 ranks | iteration 200/400 | loss 60 |" in text and "Traceback" not in text


@pytest.mark.slow
@on_a_terminal
def test_a_small_screen_shows_the_runs_that_go_on(tmp_path: Path, socket_folder: Path) -> None:
    for number in range(5):
        ended = GrowingRun(tmp_path / f"ended-{number}")
        ended.write(1, 2)
        ended.end()
    GrowingRun(tmp_path / "z-with-a-name-that-is-longer-than-the-screen-is-wide").write(1, 30)
    with Terminal(socket_folder, [*COMMAND, str(tmp_path), "--terminal"], 40, 10) as terminal:
        lines = terminal.screen_when(lambda text: "ended-0" in text)
        assert lines[0] == "z-with-a-name-that-is-longer-than-the-s…"
        assert len(lines[1]) <= 40 and lines[1].endswith("  loss 77") and lines[2].endswith("…")
        assert lines[4].startswith("ended-0  ok") and lines[8].startswith("4 more runs")
        terminal.press("C-c")
        assert terminal.exit_code() == 0


@pytest.mark.slow
def test_without_a_terminal_each_change_of_a_run_is_a_line(tmp_path: Path) -> None:
    growing = GrowingRun(tmp_path / "runs" / HOSTILE)
    growing.write(1, 10)
    with subprocess.Popen(
        [*COMMAND, str(tmp_path / "runs"), "--terminal"], stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True
    ) as process:
        assert process.stdout is not None and process.stderr is not None
        figures = "lr 1.00E-03 | grad norm 0.5 | 2,048 tok/s | 0.25 TFLOPs | 1 GiB/rank"
        name = "\\x1b]2;owned\\x07\\x1b[31mred[bold]"
        first = f"{name} | running | 2 ranks | iteration 10/400 | ETA 0:13:00 | loss 79 | {figures}\n"
        assert process.stdout.readline() == first
        growing.write(11, 200)
        growing.end()
        lines = iter(process.stdout.readline, "")
        last = next(line for line in lines if "| ok |" in line)
        assert last == f"{name} | ok | 2 ranks | iteration 200/400 | loss 60 | {figures}\n"
        process.send_signal(signal.SIGINT)
        assert list(lines) == [] and process.stderr.read() == ""
    assert process.returncode == 0


def test_a_page_and_a_terminal_exclude_each_other(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    for option in (["--port", "0"], ["--no-open"]):
        assert run(["watch", str(tmp_path), "--terminal", *option]) == 2
        assert "--terminal shows no page: leave out --port and --no-open" in capsys.readouterr().err
    assert run(["watch", str(tmp_path / "none"), "--terminal"]) == 2
    assert capsys.readouterr().err.startswith(f"fugaku-gpt: {tmp_path / 'none'}: no such folder")

"""Tests of the page of runs as text: size, escapes, policy, and what it says of the runs."""

from __future__ import annotations

import base64
import hashlib
import html
import json
import math
import re
import shutil
from html.parser import HTMLParser
from pathlib import Path
from typing import Any, Dict, List

import numpy as np
import pytest
import yaml

from fugaku_gpt.errors import UsageError
from fugaku_gpt.records.accounting import JobAccount, write_accounting
from fugaku_gpt.records.metrics import MetricsWriter, read_sound_lines
from fugaku_gpt.records.run import RunDirectory
from fugaku_gpt.report.page_figures import Curve
from fugaku_gpt.report.page_runs import gantt_picture
from fugaku_gpt.report.run_page import ASSETS, _fitted, points_in_room, write_run_page
from tests.report.page_runs import STEP, page_lines, write_page_run
from tests.report.traces import write_rank

MIB = 2**20


class Elements(HTMLParser):
    """The elements of a page, as a browser finds them, with the text of scripts and styles."""

    def __init__(self, text: str) -> None:
        super().__init__()
        self.names: List[str] = []
        self.policy = ""
        self.scripts: List[str] = []
        self.styles: List[str] = []
        self.data = ""
        self._kind = ""
        self.feed(text)

    def handle_starttag(self, tag: str, attrs: Any) -> None:
        attributes = dict(attrs)
        self.names.append(tag)
        self._kind = f"{tag} {attributes.get('type', '')}".strip()
        if attributes.get("http-equiv") == "Content-Security-Policy":
            self.policy = str(attributes["content"])

    def handle_data(self, data: str) -> None:
        if self._kind == "script":
            self.scripts.append(data)
        elif self._kind == "style":
            self.styles.append(data)
        elif self._kind == "script application/json":
            self.data += data

    def handle_endtag(self, tag: str) -> None:
        self._kind = ""


def page_of(folder: Path, **expected: int) -> Elements:
    """Write the page of the runs in a folder, and read it."""
    path = folder.parent / "page.html"
    written = write_run_page([folder], path)
    text = path.read_text(encoding="utf-8")
    assert written.size == path.stat().st_size
    assert {name: getattr(written, name) for name in expected} == expected
    return Elements(text)


def runs_of(page: Elements) -> List[Dict[str, Any]]:
    """The runs in a page's data."""
    return list(json.loads(page.data)["runs"])


def points(curve: Dict[str, Any]) -> List["tuple[int, float]"]:
    """(iteration, value) of a curve."""
    at, iterations = 0, []
    for step in curve["steps"]:
        at += step
        iterations.append(at)
    return list(zip(iterations, curve["values"]))


def test_a_small_run_is_in_the_page_with_every_value(tmp_path: Path) -> None:
    write_page_run(tmp_path / "runs" / "a", lines=30, settings=["layout.dp=2"])
    page = page_of(tmp_path / "runs", runs=1, points=0)
    (run,) = runs_of(page)
    lines = list(page_lines(30, 1e-3, 1))
    for key, name, factor in (("loss", "loss", 1), ("rss_max", "rss_max_bytes", 2**-30), ("bubble", "bubble", 100)):
        expected = [(line["iteration"], pytest.approx(factor * line[name], rel=1e-5)) for line in lines]
        assert points(run["curves"][key]) == expected
    assert run["curves"]["compute_max"]["ranks"] == [line["compute_max_rank"] for line in lines]
    assert points(run["curves"]["tokens"])[-1] == (30 * STEP, lines[-1]["consumed_tokens"])
    assert points(run["curves"]["elapsed"])[-1][1] == pytest.approx(STEP * sum(line["seconds"] for line in lines))
    assert [at for at, _ in points(run["curves"]["evaluation:held-out"])] == [50, 100, 150]
    facts = dict(run["facts"])
    assert (facts["dp × tp × pp"], facts["iterations"], run["status"]) == ("2 × 1 × 1", "150", "ok")
    slowest = run["stragglers"][0]
    assert (slowest["rank"], slowest["node"]) == (3, "node00") and slowest["share"] > 0.5
    assert 0.05 < slowest["excess"] < 0.09


@pytest.mark.parametrize(
    "count",
    [1, pytest.param(20, marks=pytest.mark.slow), pytest.param(200, marks=[pytest.mark.long, pytest.mark.slow])],
)
def test_a_page_is_bounded_and_says_that_curves_are_thinned(tmp_path: Path, count: int) -> None:
    first = write_page_run(tmp_path / "runs" / "run-0", lines=800)
    for number in range(1, count):
        shutil.copytree(first.path, tmp_path / "runs" / f"run-{number}")
    path = tmp_path / "page.html"
    written = write_run_page([tmp_path / "runs"], path)
    assert written.size == path.stat().st_size <= 2 * MIB * (1 + max(0, count - 20) / 100)
    page = Elements(path.read_text(encoding="utf-8"))
    data = json.loads(page.data)
    assert len(data["runs"]) == count
    losses = [line["loss"] for line in read_sound_lines(first.metrics_file)[0] if line["kind"] == "iteration"]
    for run in data["runs"][:3]:
        shown = [value for _, value in points(run["curves"]["loss"])]
        assert (min(shown), max(shown)) == (pytest.approx(min(losses), rel=1e-8), pytest.approx(max(losses), rel=1e-8))
        assert len(shown) <= written.points if written.points else len(shown) == len(losses)
    assert (written.points == 0) == (count == 1)
    assert any(f"more than {written.points} points are thinned" in note for note in data["notes"]) == (count > 1)


def test_nothing_of_a_run_becomes_markup_or_ends_the_data(tmp_path: Path) -> None:
    hostile = "</script><script>alert(1)</script><!--\u2028\x1b[31m\u202e\" onload='x'"
    run = write_page_run(tmp_path / "runs" / "<b>&amp;'\"<img src=x>", lines=1, reason=hostile)
    writer = MetricsWriter(run.metrics_file)
    writer.write("left_out", {"iteration": 2, "why": hostile})
    writer.write("evaluation", {"iteration": 2, "name": hostile, "loss": 1.0})
    writer.close()
    page = page_of(tmp_path / "runs", runs=1)
    empty = page_of(write_page_run(tmp_path / "other" / "a", lines=1).path.parent)
    assert page.names == empty.names and len(page.scripts) == 2
    assert not re.search("[<>&\u2028\x1b\u202e]", page.data)
    (shown,) = runs_of(page)
    assert shown["name"] == "<b>&amp;'\"<img src=x>" and shown["reason"].startswith("</script><script>alert(1)")
    assert "\u202e" not in json.dumps(shown, ensure_ascii=False) and "\x1b" not in json.dumps(shown, ensure_ascii=False)


def test_the_policy_allows_the_scripts_and_styles_of_the_page_by_hash_and_nothing_else(tmp_path: Path) -> None:
    write_page_run(tmp_path / "runs" / "a", lines=1)
    page = page_of(tmp_path / "runs")
    policy = dict(part.split(" ", 1) for part in html.unescape(page.policy).split("; "))

    def hashes(texts: List[str]) -> str:
        digests = (base64.b64encode(hashlib.sha256(text.encode()).digest()).decode() for text in texts)
        return " ".join(f"'sha256-{digest}'" for digest in digests)

    assert policy == {
        "default-src": "'none'", "script-src": hashes(page.scripts), "style-src": hashes(page.styles),
        "img-src": "data:", "connect-src": "'none'", "base-uri": "'none'", "form-action": "'none'",
    }  # fmt: skip
    assert "link" in page.names and not {"iframe", "object", "embed", "base"} & set(page.names)


def test_the_files_of_uplot_are_those_of_the_release() -> None:
    release = yaml.safe_load((ASSETS / "uPlot.yaml").read_text(encoding="utf-8"))
    for name, digest in release["sha256"].items():
        assert hashlib.sha256((ASSETS / name).read_bytes()).hexdigest() == digest, name
    assert f"(v{release['version']})" in (ASSETS / "uPlot.iife.min.js").read_text(encoding="utf-8")[:100]
    assert release["licence"] == "MIT" and "The MIT License" in (ASSETS / "uPlot.LICENSE").read_text(encoding="utf-8")
    own = {"run_page.js", "run_page.css", "uPlot.yaml"}
    assert {path.name for path in ASSETS.iterdir()} == {*release["sha256"], *own}


def test_settings_in_which_runs_differ_are_named_as_in_tables(tmp_path: Path) -> None:
    for name, lr in (("a", 1e-3), ("b", 3e-4)):
        write_page_run(tmp_path / "runs" / name, lines=1, lr=lr, settings=["training.seed=7"])
    assert [run["differs"] for run in runs_of(page_of(tmp_path / "runs"))] == [[["lr", "0.001"]], [["lr", "0.0003"]]]


def test_lines_that_a_resumed_run_has_superseded_are_left_out_and_the_resumption_is_an_event(tmp_path: Path) -> None:
    run = write_page_run(tmp_path / "runs" / "a", lines=10)
    writer = MetricsWriter(run.metrics_file)
    writer.write("resumed", {"iteration": 4 * STEP, "checkpoint": "step-20"})
    writer.write("iteration", {"iteration": 5 * STEP, "loss": None})
    writer.write("iteration", {"iteration": 6 * STEP, "loss": 3.25})
    writer.close()
    (shown,) = runs_of(page_of(tmp_path / "runs"))
    assert points(shown["curves"]["loss"])[4:] == [(25, None), (30, 3.25)]  # a loss that was not finite is a gap
    assert shown["events"] == [[20, "resumed from step-20"]]


def test_energy_of_the_run_s_jobs_is_in_the_table(tmp_path: Path) -> None:
    run = write_page_run(tmp_path / "runs" / "a", lines=2)
    account = JobAccount(scheduler="pjm", job_id="7", nodes=4, elapsed_seconds=1000.0, energy_joules=4e5)
    write_accounting(run.path, (account,))
    facts = dict(runs_of(page_of(tmp_path / "runs"))[0]["facts"])
    assert (facts["W per node"], facts["energy"]) == ("100.0", "measured")


@pytest.mark.parametrize(("ranks", "shown"), [(64, "all traced ranks"), (65, "the first 64 of 65 traced ranks")])
def test_a_picture_of_a_trace_has_64_ranks_at_most(tmp_path: Path, ranks: int, shown: str) -> None:
    run = RunDirectory(tmp_path)
    for rank in range(ranks):
        write_rank(run.trace_dir, rank, [(0.0, "forward", 4, 0)], ranks=ranks, dp=rank, pp=0)
    picture = gantt_picture(run.path)
    assert picture is not None and picture.image and f"Each row is a rank, {shown}:" in picture.text


def test_the_picture_of_a_trace_is_in_the_page(tmp_path: Path) -> None:
    run = write_page_run(tmp_path / "runs" / "a", lines=1)
    for rank in range(2):
        write_rank(run.trace_dir, rank, [(0.0, "forward", 4, 0), (4.0, "backward", 4, 0)])
    (shown,) = runs_of(page_of(tmp_path / "runs"))
    kind, _, content = shown["gantt"]["image"].partition(",")
    assert kind == "data:image/svg+xml;base64" and base64.b64decode(content).startswith(b"<svg ")
    assert "all traced ranks" in shown["gantt"]["text"]
    next(path for path in run.trace_dir.rglob("*") if path.is_file()).write_bytes(b"damaged")
    (shown,) = runs_of(page_of(tmp_path / "runs"))
    assert shown["gantt"]["image"] == "" and str(run.trace_dir) in shown["gantt"]["text"]


def test_a_run_without_metrics_is_a_row_and_damage_is_named(tmp_path: Path) -> None:
    run = write_page_run(tmp_path / "runs" / "a", lines=2)
    run.metrics_file.unlink()
    other = RunDirectory(write_page_run(tmp_path / "runs" / "b", lines=2).path)
    with open(other.metrics_file, "a") as stream:
        stream.write('damaged\n{"kind": "iteration", "iteration": 15}\n')
    (other.path / "result.json").write_text("{")
    first, second = runs_of(page_of(tmp_path / "runs"))
    assert first["curves"] == {} and first["status"] == "ok"
    assert second["status"] == "running" and len(second["problems"]) == 2  # this process has claimed it
    assert "1 damaged lines" in second["problems"][1]


def test_folders_without_runs_and_files_that_cannot_be_written_are_refused(tmp_path: Path) -> None:
    with pytest.raises(UsageError, match="no such folder"):
        write_run_page([tmp_path / "none"], tmp_path / "page.html")
    run = write_page_run(tmp_path / "runs" / "a", lines=1)
    (tmp_path / "empty").mkdir()
    with pytest.raises(UsageError, match="empty: holds no run directory"):
        write_run_page([run.path, tmp_path / "empty"], tmp_path / "page.html")
    assert not (tmp_path / "page.html").exists()
    with pytest.raises(UsageError, match=r"page\.html: cannot be written"):
        write_run_page([run.path], tmp_path / "none" / "page.html")


def test_runs_are_named_by_paths_below_the_folder_of_all(tmp_path: Path) -> None:
    for name in ("s1/a", "s2/a", "s2/b"):
        write_page_run(tmp_path / name, lines=1)
    for folders, names in (
        (["s1"], ["a"]),
        (["s1/a"], ["a"]),
        (["s1", "s2"], ["s1/a", "s2/a", "s2/b"]),
        (["s2/a", "s2/b", "s2"], ["a", "b"]),
    ):
        write_run_page([tmp_path / folder for folder in folders], tmp_path / "page.html")
        page = Elements((tmp_path / "page.html").read_text(encoding="utf-8"))
        assert [run["name"] for run in runs_of(page)] == names


@pytest.mark.parametrize(("digits", "is_guess_used"), [(3, True), (1, False), (7, False)])
def test_points_are_added_where_a_tenth_of_the_room_is_empty_and_removed_where_they_do_not_fit(
    digits: int, is_guess_used: bool
) -> None:
    at = np.arange(0, 50000, 10, dtype=float)
    curves = [{"loss": Curve(at, 1.0 + 10.0**-digits * (at / 10 % 7 + 1), None, 9, math.nan)}]
    room, guess = 10000, points_in_room(10000, 1, 5000)
    points, fitted = _fitted(curves, room, 5000)
    size = len(json.dumps(fitted[0], separators=(",", ":")))
    assert len(fitted[0]["loss"]["values"]) <= points and 0.9 * room <= size <= room, size
    assert (points == guess) == is_guess_used

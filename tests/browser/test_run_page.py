"""Tests of the run page in a real browser: does it draw, obey its controls, load nothing, and grow while it is live?"""

from __future__ import annotations

import shutil
from pathlib import Path

import pytest

from fugaku_gpt.records.metrics import MetricsWriter
from fugaku_gpt.report.live_runs import LiveRuns
from fugaku_gpt.report.live_server import LiveServer
from fugaku_gpt.report.page_figures import FIGURES
from fugaku_gpt.report.run_page import write_run_page
from tests.browser.conftest import Observed
from tests.report.page_runs import STEP, page_lines, write_page_run

RATES = (1e-3, 3e-4)


@pytest.fixture
def runs(tmp_path: Path) -> Path:
    """A folder of two runs."""
    for number, lr in enumerate(RATES):
        write_page_run(tmp_path / "runs" / f"lr-{lr:g}", lr=lr, seed=number)
    return tmp_path / "runs"


def open_page(tab: Observed, runs: Path) -> None:
    """Write the page of runs, and open it."""
    page = runs.parent / "page.html"
    write_run_page([runs], page)
    tab.page.goto(page.as_uri())
    tab.wait_for("window.runPage && runPage.charts.size > 0")
    tab.show("loss")


def test_every_figure_is_drawn_with_the_values_of_both_runs(tab: Observed, runs: Path) -> None:
    open_page(tab, runs)
    losses = [[line["loss"] for line in page_lines(50, lr, number)] for number, lr in enumerate(RATES)]
    by_name = dict(zip(("lr-0.001", "lr-0.0003"), losses))
    names = tab.page.evaluate("runPage.charts.get('loss').members.map(run => run.name)")
    assert tab.values("loss") == [pytest.approx(by_name[name], rel=1e-8) for name in names]
    drawn = tab.page.evaluate("[...runPage.charts.keys()]")
    changing = {figure.key for figure in FIGURES if not figure.is_setting}
    assert changing - set(drawn) == {"accuracy", "validation_accuracy", "images_per_second"}
    assert "evaluation:held-out" in drawn and all(map(tab.has_ink, drawn))
    assert tab.requests == []


def test_smoothing_logarithms_and_differences_change_the_curves(tab: Observed, runs: Path) -> None:
    open_page(tab, runs)
    raw = tab.values("tokens_per_second")

    def roughness(curves: "list[list[float]]") -> float:
        return sum(abs(left - right) for values in curves for left, right in zip(values, values[1:]))

    tab.page.locator("#smoothing").fill("0.9")
    assert roughness(tab.values("tokens_per_second")) < 0.2 * roughness(raw)
    tab.page.locator("#smoothing").fill("0")
    assert tab.values("tokens_per_second") == raw
    for axis in ("x", "y"):
        tab.page.locator(f"#log-{axis}").check()
        assert tab.page.evaluate("axis => runPage.charts.get('loss').plot.scales[axis].distr", axis) == 3
        assert tab.has_ink("loss")
        tab.page.locator(f"#log-{axis}").uncheck()
    tab.page.locator("#reference").select_option(label="lr-0.001")
    names = tab.page.evaluate("runPage.charts.get('loss').members.map(run => run.name)")
    differences = dict(zip(names, tab.values("loss")))
    fast, slow = ([line["loss"] for line in page_lines(50, lr, number)] for number, lr in enumerate(RATES))
    assert set(differences["lr-0.001"]) == {0}
    assert differences["lr-0.0003"] == pytest.approx([high - low for high, low in zip(slow, fast)], abs=1e-7)
    tab.page.locator("#reference").select_option(label="none")
    tab.page.locator("#x").select_option("tokens")
    assert tab.page.evaluate("runPage.charts.get('loss').plot.data[0][0]") == 65536 * STEP


def test_a_zoom_is_of_all_figures_and_the_pointer_shows_values_with_ranks(tab: Observed, runs: Path) -> None:
    open_page(tab, runs)
    over = tab.page.locator("[data-figure=loss] .u-over")
    box = over.bounding_box()
    assert box is not None
    tab.page.mouse.move(box["x"] + 0.25 * box["width"], box["y"] + 50)
    tab.page.mouse.down()
    tab.page.mouse.move(box["x"] + 0.5 * box["width"], box["y"] + 50, steps=5)
    tab.page.mouse.up()
    scale = "key => { const { min, max } = runPage.charts.get(key).plot.scales.x; return [min, max]; }"
    tab.wait_for("runPage.view.zoom !== null")
    tab.show("lr")
    low, high = tab.page.evaluate(scale, "loss")
    assert STEP < low < high < 50 * STEP
    assert tab.page.evaluate(scale, "lr") == pytest.approx([low, high])
    tab.show("compute_min")  # is drawn after the zoom
    assert tab.page.evaluate(scale, "compute_min") == pytest.approx([low, high])
    assert tab.page.evaluate(scale, "loss") == pytest.approx([low, high])
    tab.page.locator("#reset").click()
    tab.show("validation")
    assert tab.page.evaluate(scale, "loss") == [STEP, 50 * STEP] == tab.page.evaluate(scale, "validation")
    tab.show("compute_max")
    slowest = tab.page.locator("[data-figure=compute_max]")
    slowest.locator(".u-over").hover()
    tip = slowest.locator(".tip")
    tip.wait_for(state="visible")
    assert "lr-0.001" in tip.inner_text() and "rank " in tip.inner_text()


def test_runs_are_hidden_shown_and_filtered(tab: Observed, runs: Path) -> None:
    open_page(tab, runs)
    assert "lr" in tab.page.locator("#runs thead").inner_text()
    tab.page.get_by_label("show lr-0.001", exact=True).uncheck()
    assert len(tab.values("loss")) == 1
    tab.page.locator("#filter").fill("lr=0.001")
    assert tab.page.locator("#runs tbody tr").count() == 1
    tab.page.locator("#show-all").click()
    assert len(tab.values("loss")) == 2
    tab.page.locator("#filter").fill("")
    tab.page.locator("#show-none").click()
    assert tab.page.evaluate("runPage.charts.size") == 0


def test_texts_of_runs_are_no_markup(tab: Observed, tmp_path: Path) -> None:
    hostile = "</script><script>document.title='owned'</script><img src=x onerror=\"document.title='owned'\">"
    run = write_page_run(tmp_path / "runs" / "a&b<i>'\"<img src=x>", reason=hostile)
    writer = MetricsWriter(run.metrics_file)
    writer.write("evaluation", {"iteration": 1, "name": hostile, "loss": 1.0})
    writer.write("left_out", {"iteration": 2, "why": hostile})
    writer.close()
    open_page(tab, tmp_path / "runs")
    assert tab.page.title() == "Runs" and tab.page.locator("img").count() == 0
    assert "a&b<i>'\"<img src=x>" in tab.page.locator("#runs").inner_text()
    tab.page.locator("#events summary").click()
    assert hostile[:50] in tab.page.locator("#events").inner_text()
    assert tab.requests == []


def test_a_script_that_the_policy_does_not_name_is_not_run(tab: Observed, runs: Path) -> None:
    open_page(tab, runs)
    tab.page.evaluate(
        "() => { const script = document.createElement('script'); script.textContent = 'window.owned = 1';"
        "document.body.append(script); }"
    )
    assert tab.page.evaluate("window.owned") is None
    assert len(tab.complaints) == 1 and "Content Security Policy" in tab.complaints.pop()


@pytest.mark.parametrize("scheme", ["light", "dark"])
@pytest.mark.parametrize("width", [400, 1300])
def test_nothing_is_wider_than_the_window(tab: Observed, runs: Path, scheme: str, width: int) -> None:
    tab.page.emulate_media(color_scheme=scheme)  # type: ignore[arg-type]
    tab.page.set_viewport_size({"width": width, "height": 900})
    open_page(tab, runs)
    assert tab.page.evaluate("document.documentElement.scrollWidth") <= width
    ground = tab.page.evaluate("getComputedStyle(document.body).backgroundColor")
    assert ground == ("rgb(255, 255, 255)" if scheme == "light" else "rgb(20, 25, 31)")


def test_a_printed_page_is_light_and_fits_the_paper(tab: Observed, runs: Path) -> None:
    tab.page.emulate_media(color_scheme="dark")
    open_page(tab, runs)
    before = tab.page.evaluate("runPage.charts.get('loss').plot.width")
    assert tab.page.pdf(format="A4").startswith(b"%PDF")
    tab.page.evaluate("dispatchEvent(new Event('beforeprint'))")
    assert tab.page.evaluate("[...runPage.charts.values()].every(chart => chart.plot && !chart.isStale)")
    assert tab.page.evaluate("runPage.charts.get('loss').plot.width") == 340
    tab.page.evaluate("dispatchEvent(new Event('afterprint'))")
    assert tab.page.evaluate("runPage.charts.get('loss').plot.width") == before


def test_a_live_page_grows_is_resumed_and_loses_runs(tab: Observed, runs: Path) -> None:
    server = LiveServer(LiveRuns([runs]), interval=0.05)
    newest = "runPage.charts.get('loss')?.plot?.data[0].at(-1)"
    with server.serving():
        tab.page.goto(server.url)
        tab.wait_for(f"runPage.runs.size === 2 && {newest} === {50 * STEP}")
        write_page_run(runs / "third", lines=20)
        tab.wait_for("runPage.runs.size === 3 && runPage.charts.get('loss')?.plot?.data.length === 4")
        writer = MetricsWriter(runs / "third" / "metrics.jsonl")
        for line in page_lines(60, 1e-3, 5):
            if line["iteration"] > 20 * STEP:
                writer.write("iteration", line)
        tab.wait_for(f"{newest} === {60 * STEP}")
        writer.write("resumed", {"iteration": 10 * STEP, "checkpoint": "step-50"})
        tab.wait_for(f"{newest} === {50 * STEP}")
        for line in page_lines(11, 1e-3, 6):
            if line["iteration"] > 10 * STEP:
                writer.write("iteration", {**line, "loss": 1.5})
        writer.close()
        tab.wait_for("runPage.charts.get('loss').plot.data.some(values => values.includes(1.5))")
        shutil.rmtree(runs / "third")
        tab.wait_for("runPage.runs.size === 2 && runPage.charts.get('loss')?.plot?.data.length === 3")
        assert "live" in tab.page.locator("#state").inner_text()
        assert all(url.startswith(f"http://127.0.0.1:{server.port}/") for url in tab.requests)
    tab.wait_for("document.getElementById('state').textContent.includes('ended')")

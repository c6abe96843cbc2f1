"""Tests of run files, rank maps and the sweep file that a search writes: they describe its layouts and can be read
back."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import List, Tuple

import pytest

from fugaku_gpt.cli.main import run
from fugaku_gpt.config import load_run_config
from fugaku_gpt.errors import UsageError
from fugaku_gpt.machine.constants import load_machine
from fugaku_gpt.planner.search.best import RankedLayout, best_layouts
from fugaku_gpt.planner.search.topology import SearchSpace, search_layouts
from fugaku_gpt.planner.search.write import layout_name, measurement_elapse, with_rank_map, write_layouts
from fugaku_gpt.sweep.expand import expand_sweep

RAMP = ["training.ramp_start=16", "training.ramp_increment=16", "training.ramp_samples=640"]


def _best(top: int, *settings: str) -> List[RankedLayout]:
    config = load_run_config(None, "124m", ["node.freq_mhz=2000", "job.elapse=1:00:00", *settings], check=False)
    space = SearchSpace(config, load_machine("a64fx"), "A64FX", "1.10", (12, 12), (1, 2, 4), (96,))
    costed = search_layouts(space)
    thinned = replace(costed, ranking=costed.ranking[:: max(1, len(costed.ranking) // top)])
    return best_layouts(space, thinned, top, variants=True)[0]


@pytest.fixture(scope="module")
def written(tmp_path_factory: pytest.TempPathFactory) -> Tuple[List[RankedLayout], List[Path]]:
    best = _best(30)
    return best, write_layouts(best, tmp_path_factory.mktemp("best"), "measure", 7)


@pytest.mark.slow
def test_run_files_read_back_as_the_layouts_and_name_their_rank_maps(
    written: Tuple[List[RankedLayout], List[Path]],
) -> None:
    best, files = written
    assert len(files) == 2 * len(best) + 1
    for number, layout in enumerate(best, 1):
        label = layout_name(number, layout.config)
        file = files[0].parent / f"{label}.yaml"
        read = load_run_config(file)  # every rule between settings is checked
        assert read == with_rank_map(layout, file.with_suffix(".rankmap"))
        lines = Path(read.job.rank_map_file).read_text().splitlines()[1:]
        assert len(lines) == read.layout.ranks and len(set(lines)) == read.job.nodes == 12
        assert file.read_text().startswith(f"# predicted: {layout.prediction.seconds.value:.4g} s per iteration")


@pytest.mark.slow
def test_plan_check_proves_every_layout(
    written: Tuple[List[RankedLayout], List[Path]], capsys: pytest.CaptureFixture[str]
) -> None:
    _, files = written
    for file in files[1:-1:2]:
        assert run(["plan", "check", str(file)]) == 0, capsys.readouterr().err
        assert "no deadlock" in capsys.readouterr().out


def test_the_sweep_measures_the_same_layouts_with_few_iterations(
    written: Tuple[List[RankedLayout], List[Path]],
) -> None:
    best, files = written
    sweep = expand_sweep(files[-1])
    assert sweep.name == "measure" and len(sweep.runs) == len(best)
    for number, (row, layout) in enumerate(zip(sweep.runs, best), 1):
        assert row.name.startswith(layout_name(number, layout.config)) and row.config is not None
        assert row.config.layout == layout.config.layout and row.config.training.iterations == 7
        assert replace(row.config.training, iterations=layout.config.training.iterations) == layout.config.training
        assert row.config.job.rank_map_file == str(files[0].parent / f"{layout_name(number, layout.config)}.rankmap")


def test_a_growing_batch_stays_in_the_run_files_and_is_not_measured(tmp_path: Path) -> None:
    best = _best(2, *RAMP)
    *_, file, sweep = write_layouts(best, tmp_path, "measure", 7)
    assert load_run_config(file).training.ramp_start == 16
    assert all(
        sweep_run.config and sweep_run.config.training.ramp_start is None for sweep_run in expand_sweep(sweep).runs
    )


def test_replicas_that_sum_by_nodes_first_get_no_rank_map(tmp_path: Path) -> None:
    files = write_layouts(_best(1, "layout.hierarchical_sum=true"), tmp_path, "measure", 7)
    assert [file.suffix for file in files] == [".yaml", ".yaml"]
    config = load_run_config(files[0])
    assert config.job.shape == "2x2x3" and not config.job.rank_map_file


def test_an_output_folder_that_cannot_be_created_is_a_usage_error(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    with pytest.raises(UsageError, match="--out"):
        write_layouts(_best(1), tmp_path / "file", "measure", 7)


@pytest.mark.parametrize("elapse", ["job.elapse=24:00:00", "job.elapse=null"])
def test_the_sweep_s_limits_are_made_of_the_predicted_times(tmp_path: Path, elapse: str) -> None:
    best = _best(3, elapse)
    file = write_layouts(best, tmp_path, "measure", 7)[-1]
    runs = expand_sweep(file).runs
    limits = [run.config.job.elapse for run in runs if run.config is not None]
    assert limits == [measurement_elapse(layout.prediction.seconds.high, 7) for layout in best]
    for layout, limit in zip(best, limits):
        assert limit is not None and limit % 600 == 0
        assert 7 * layout.prediction.seconds.high < limit < 14 * layout.prediction.seconds.high + 1200


def test_the_sweep_names_the_corpus_of_the_run_or_says_that_it_lacks_one(
    written: Tuple[List[RankedLayout], List[Path]], tmp_path: Path
) -> None:
    _, files = written
    text = files[-1].read_text()
    assert "data.paths: []" in text and "# data.paths is empty: name a corpus there" in text
    text = write_layouts(_best(1, "data.paths=[corpus]"), tmp_path, "measure", 7)[-1].read_text()
    assert "data.paths: [corpus]" in text and "is empty" not in text


def test_rank_maps_go_with_the_folder(written: Tuple[List[RankedLayout], List[Path]], tmp_path: Path) -> None:
    _, files = written
    moved = tmp_path / "moved"
    moved.mkdir()
    for file in files:
        (moved / file.name).write_text(file.read_text())
    (row, *_) = expand_sweep(moved / "sweep.yaml").runs
    assert row.config is not None and Path(row.config.job.rank_map_file).parent == moved

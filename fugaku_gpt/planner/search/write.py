"""The best layouts as files: a run file and a rank map for each, and a sweep file that measures them all."""

from __future__ import annotations

import math
from dataclasses import replace
from pathlib import Path
from typing import Any, Dict, List, Mapping, Sequence

import yaml

from fugaku_gpt.config import changed_settings, config_values, dotted_settings
from fugaku_gpt.config.schema import RunConfig
from fugaku_gpt.errors import UsageError
from fugaku_gpt.planner.search.best import RankedLayout
from fugaku_gpt.records.files import write_text_atomically

SWEEP = "sweep.yaml"
MISSING_CORPUS = "data.paths is empty: name a corpus there, or with --set data.paths=[DIR], before these runs start"
_START_SECONDS = 600.0  # to import, initialise and open files on all ranks
_ELAPSE_UNIT = 600.0


def layout_name(number: int, config: RunConfig) -> str:
    """Name of the files of a layout, such as ``01-dp128-tp4-pp1-mbs2-full``."""
    layout, training = config.layout, config.training
    labels = [f"{number:02d}-dp{layout.dp}-tp{layout.tp}-pp{layout.pp}"]
    labels += [f"chunks{layout.chunks}"] if layout.chunks > 1 else []
    labels += [f"ppn{config.ranks_per_node}-mbs{training.micro_batch}"]
    labels += ["full"] if training.recompute == "full" else []
    labels += ["zero1"] if layout.zero else []
    labels += ["sp"] if layout.sequence_parallel else []
    return "-".join(labels)


def with_rank_map(best: RankedLayout, file: Path) -> RunConfig:
    """The run with its box of nodes, and with its rank map ``file`` unless replicas sum within nodes first: then the
    trainer has to know which ranks share a node, and it does not read maps."""
    config, node_box = best.config, best.node_box
    if node_box is None:
        return config
    job = replace(
        config.job, shape=node_box.shape, allocation=config.job.allocation or node_box.allocation, rank_map=""
    )
    if best.rank_map is not None and not config.layout.hierarchical_sum:
        job = replace(job, rank_map_file=str(file))
    return replace(config, job=job)


def write_layouts(layouts: Sequence[RankedLayout], out: Path, name: str, iterations: int) -> List[Path]:
    """Writes run files, rank maps and the sweep file to a folder; rank maps are named relative to it.

    Args:
        name: name of the sweep.
        iterations: iterations of each run of the sweep.

    Returns:
        All files, the sweep file last.

    Raises:
        UsageError: the files cannot be written.
    """
    written, configs = [], {}
    try:
        out.mkdir(parents=True, exist_ok=True)
        for number, best in enumerate(layouts, 1):
            label = layout_name(number, best.config)
            file = out / f"{label}.rankmap"
            configs[label] = config = with_rank_map(best, Path(file.name))
            if config.job.rank_map_file and best.rank_map is not None:
                write_text_atomically(file, best.rank_map.hostfile_text())
                written.append(file)
            written.append(out / f"{label}.yaml")
            write_text_atomically(written[-1], run_text(best, config))
        written.append(out / SWEEP)
        seconds = [best.prediction.seconds.high for best in layouts]
        write_text_atomically(written[-1], sweep_text(configs, seconds, name, iterations))
    except OSError as error:
        raise UsageError(f"--out {out}: cannot be written: {error}") from None
    return written


def run_text(best: RankedLayout, config: RunConfig) -> str:
    """A run file whose header has its prediction."""
    guess = best.prediction.seconds
    header = f"# predicted: {guess.value:.4g} s per iteration, 80 % interval {guess.low:.4g} to {guess.high:.4g}\n"
    header += "".join(f"# extrapolated: {text}\n" for text in best.prediction.extrapolated)
    return header + _yaml(_settings_tree(changed_settings(config)))


def sweep_text(layouts: Mapping[str, RunConfig], seconds: Sequence[float], name: str, iterations: int) -> str:
    """A sweep file with a row for each layout, at the full batch; settings that all layouts share are its defaults.

    Args:
        seconds: for each layout, the upper end of the predicted seconds per iteration, of which its elapse is made.
    """
    configs = [_measurement_run(config, high, iterations) for config, high in zip(layouts.values(), seconds)]
    changed = list(dict.fromkeys(key for config in configs for key in changed_settings(config)))
    values = [dotted_settings(config_values(config)) for config in configs]
    shared = {key: values[0][key] for key in changed if all(settings[key] == values[0][key] for settings in values)}
    shared.setdefault("data.paths", [])
    rows = [
        {"label": label, **{key: settings[key] for key in changed if key not in shared}}
        for label, settings in zip(layouts, values)
    ]
    head = f"# The {len(rows)} fastest layouts by `fugaku-gpt plan topology`, to be measured.\n"
    head += "" if shared["data.paths"] else f"# {MISSING_CORPUS}\n"
    return head + _yaml({"name": name, "defaults": shared, "include": rows})


def measurement_elapse(seconds: float, iterations: int) -> float:
    """Seconds that a job needs for a few iterations: twice the upper end of the predicted time, since the first
    iterations take longer, and the start, in whole units of ten minutes."""
    needed = _START_SECONDS + 2 * iterations * seconds
    return math.ceil(needed / _ELAPSE_UNIT) * _ELAPSE_UNIT


def _measurement_run(config: RunConfig, seconds: float, iterations: int) -> RunConfig:
    """A short run at the full batch and sequence length, named by its row, with a limit of its own predicted time."""
    training = replace(
        config.training,
        iterations=iterations,
        ramp_start=None,
        ramp_increment=None,
        ramp_samples=None,
        seq_ramp_start=None,
        seq_ramp_increment=None,
        seq_ramp_iterations=None,
        eval_interval=None,
        eval_files=(),
    )
    checkpoint = replace(config.checkpoint, interval=None, at_end=False, keep_every=None, keep_best=None)
    elapse = measurement_elapse(seconds, iterations)
    job = replace(config.job, name="", chain=1, elapse=elapse, elapse_min=None)
    return replace(config, training=training, checkpoint=checkpoint, job=job)


def _settings_tree(flat: Mapping[str, Any]) -> Dict[str, Dict[str, Any]]:
    tree: Dict[str, Dict[str, Any]] = {}
    for key, value in flat.items():
        section, _, leaf = key.partition(".")
        tree.setdefault(section, {})[leaf] = value
    return tree


def _yaml(tree: Mapping[str, Any]) -> str:
    return str(yaml.safe_dump(dict(tree), sort_keys=False, width=116, default_flow_style=None))

"""The best layouts as files: a run file and a rank map for each, and a sweep file that measures them all."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any, Dict, List, Mapping, Sequence

import yaml

from fugaku_gpt.config import changed_settings, config_values
from fugaku_gpt.config.schema import RunConfig
from fugaku_gpt.errors import UsageError
from fugaku_gpt.planner.search.best import Best
from fugaku_gpt.records.files import write_text_atomically

SWEEP = "sweep.yaml"


def name_of(number: int, config: RunConfig) -> str:
    """Of the files of a layout, such as ``01-dp128-tp4-pp1-mbs2-full``."""
    layout, training = config.layout, config.training
    parts = [f"{number:02d}-dp{layout.dp}-tp{layout.tp}-pp{layout.pp}"]
    parts += [f"chunks{layout.chunks}"] if layout.chunks > 1 else []
    parts += [f"ppn{config.ranks_per_node}-mbs{training.micro_batch}"]
    parts += ["full"] if training.recompute == "full" else []
    parts += ["zero1"] if layout.zero else []
    parts += ["sp"] if layout.sequence_parallel else []
    return "-".join(parts)


def with_map(best: Best, file: Path) -> RunConfig:
    """The run with its box of nodes and, where its replicas do not sum by nodes first, its rank map ``file`` (the
    trainer then has to know which ranks share a node, and does not read maps)."""
    config, torus = best.config, best.torus
    if torus is None:
        return config
    job = replace(config.job, shape=torus.shape, allocation=config.job.allocation or torus.allocation, rank_map="")
    if best.ranks is not None and not config.layout.hierarchical_sum:
        job = replace(job, rank_map_file=str(file))
    return replace(config, job=job)


def write_best(found: Sequence[Best], out: Path, name: str, iterations: int) -> List[Path]:
    """Run files, rank maps and the sweep file in a folder; rank maps are named as ``out`` is, from the present folder.

    Args:
        name: of the sweep.
        iterations: of each of the sweep's runs.

    Returns:
        All files, the sweep file last.

    Raises:
        UsageError: they cannot be written.
    """
    written, configs = [], {}
    try:
        out.mkdir(parents=True, exist_ok=True)
        for number, best in enumerate(found, 1):
            label = name_of(number, best.config)
            file = out / f"{label}.rankmap"
            configs[label] = config = with_map(best, file)
            if config.job.rank_map_file and best.ranks is not None:
                write_text_atomically(file, best.ranks.text())
                written.append(file)
            written.append(out / f"{label}.yaml")
            write_text_atomically(written[-1], run_text(best, config))
        written.append(out / SWEEP)
        write_text_atomically(written[-1], sweep_text(configs, name, iterations))
    except OSError as error:
        raise UsageError(f"--out {out}: cannot be written: {error}") from None
    return written


def run_text(best: Best, config: RunConfig) -> str:
    """A run file, headed by what is predicted of it."""
    guess = best.prediction.seconds
    said = f"# predicted: {guess.value:.4g} s per iteration, 80 % interval {guess.low:.4g} to {guess.high:.4g}\n"
    said += "".join(f"# extrapolated: {text}\n" for text in best.prediction.extrapolated)
    return said + _yaml(_tree(changed_settings(config)))


def sweep_text(layouts: Mapping[str, RunConfig], name: str, iterations: int) -> str:
    """A sweep file with a row for each layout, at the full batch: settings that all share are its defaults."""
    configs = [_to_measure(config, iterations) for config in layouts.values()]
    changed = list(dict.fromkeys(key for config in configs for key in changed_settings(config)))
    values = [_flat(config) for config in configs]
    shared = {key: values[0][key] for key in changed if all(one[key] == values[0][key] for one in values)}
    rows = [
        {"label": label, **{key: one[key] for key in changed if key not in shared}}
        for label, one in zip(layouts, values)
    ]
    head = f"# The {len(rows)} fastest layouts by `fugaku-gpt plan topology`, to be measured.\n"
    return head + _yaml({"name": name, "defaults": shared, "include": rows})


def _to_measure(config: RunConfig, iterations: int) -> RunConfig:
    """A short run at the full batch and sequence length, named by its row."""
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
    )
    checkpoint = replace(config.checkpoint, interval=None, at_end=False, keep_every=None)
    return replace(config, training=training, checkpoint=checkpoint, job=replace(config.job, name="", chain=1))


def _flat(config: RunConfig) -> Dict[str, Any]:
    return {
        f"{section}.{key}": value for section, values in config_values(config).items() for key, value in values.items()
    }


def _tree(flat: Mapping[str, Any]) -> Dict[str, Dict[str, Any]]:
    tree: Dict[str, Dict[str, Any]] = {}
    for key, value in flat.items():
        section, _, leaf = key.partition(".")
        tree.setdefault(section, {})[leaf] = value
    return tree


def _yaml(tree: Mapping[str, Any]) -> str:
    return str(yaml.safe_dump(dict(tree), sort_keys=False, width=116, default_flow_style=None))

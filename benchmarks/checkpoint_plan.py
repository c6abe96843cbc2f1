"""Builds what all ranks of a large run compute before its first checkpoint, on one core.

    .venv/bin/python benchmarks/checkpoint_plan.py                 # 13B on 13,824 ranks with ZeRO, about a minute
    .venv/bin/python benchmarks/checkpoint_plan.py --preset 1.3b --set layout.tp=4 --dp 64

Ranks plan their files at the same time, so a run waits for the slowest of them (``slowest rank``); ``all ranks`` is the
sum, which rank 0 alone would need for all. ``commit`` is what rank 0 computes from the ranks' reports in a thread
beside training: the manifest and its parts. ``resume`` is what a rank reads of them for a tensor of its own: the
manifest and one part. Times are of the processor, without disks and messages.
"""

from __future__ import annotations

import argparse
import tempfile
import time
from pathlib import Path
from typing import Dict, List, Sequence, Tuple

from fugaku_gpt.checkpoint.file_list import parts_of
from fugaku_gpt.checkpoint.manifest import MANIFEST, Manifest, manifest_text, read_manifest
from fugaku_gpt.config import RunConfig, load_run_config
from fugaku_gpt.layout.grid import coordinates_of
from fugaku_gpt.training.save_plan import FileSummary, SavePlan
from fugaku_gpt.training.state import KINDS

LAYOUT_13B = ("layout.tp=6", "layout.pp=8", "layout.zero=1")


def run_of(preset: str, dp: int, settings: Sequence[str]) -> RunConfig:
    """The run of a preset on ``dp`` replicas."""
    one = load_run_config(preset=preset, overrides=[*settings, "training.micro_batch=1"], check=False)
    ranks = dp * one.layout.tp * one.layout.pp
    sizes = [f"layout.dp={dp}", f"training.global_batch={8 * dp}", f"job.nodes={ranks}", "training.micro_batch=1"]
    return load_run_config(preset=preset, overrides=[*settings, *sizes])


def plan_all(config: RunConfig) -> Tuple[Manifest, Dict[str, float]]:
    """Plan the file of every rank; returns the manifest, and seconds by row of the table."""
    layout = config.layout
    plan = SavePlan(config, KINDS, [coordinates_of(rank, layout, layout.order).dp for rank in range(layout.ranks)])
    summaries: List[FileSummary] = []
    seconds = []
    for group in range(len(plan.groups)):
        before = time.process_time()
        summaries.append(plan.summarize(plan.data_file(group)))
        seconds.append(time.process_time() - before)
    checksums = [[number] * summary.entries for number, summary in enumerate(summaries)]
    state = {"iteration": 1, "consumed_samples": 1, "consumed_tokens": 1}
    before = time.process_time()
    manifest = plan.manifest(state, summaries, checksums)
    times = {"slowest rank": max(seconds), "all ranks": sum(seconds), "commit": time.process_time() - before}
    return manifest, times


def main() -> None:
    """Print the table."""
    parser = argparse.ArgumentParser()
    parser.add_argument("--preset", default="fugaku-llm-13b")
    parser.add_argument("--dp", type=int, default=288)
    parser.add_argument(
        "--set",
        action="append",
        dest="settings",
        metavar="KEY=VALUE",
        help="Settings of the run; default: the layout of 13B.",
    )
    options = parser.parse_args()
    config = run_of(options.preset, options.dp, options.settings or LAYOUT_13B)
    manifest, times = plan_all(config)
    with tempfile.TemporaryDirectory() as folder:
        before = time.process_time()
        parts = parts_of(manifest.files)
        head = manifest_text(manifest, [part for part, _ in parts])
        times["commit"] += time.process_time() - before
        for part, content in parts:
            (Path(folder) / part.name).write_bytes(content)
        (Path(folder) / MANIFEST).write_bytes(head)
        before = time.process_time()
        read_manifest(Path(folder)).files[0]
        times["resume"] = time.process_time() - before
    pieces = sum(len(file.crc32) for file in manifest.files)
    print(f"{config.layout.ranks:,} ranks, {len(manifest.files):,} files, {pieces:,} pieces")
    print(f"manifest {len(head):,} bytes, {len(parts)} parts of {sum(len(text) for _, text in parts):,} bytes in all")
    for name, value in times.items():
        print(f"{name:12s} {value:8.3f} s")


if __name__ == "__main__":
    main()

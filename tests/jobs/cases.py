"""Configurations whose job scripts are stored in ``golden/``: each toggle alone, all together, and all sizes.

``python -m tests.jobs.cases`` writes the files anew; read their difference before you commit it.
"""

from __future__ import annotations

import functools
from pathlib import Path
from typing import Dict, List, Tuple

from fugaku_gpt.config import RunConfig, load_run_config
from fugaku_gpt.config.profile import Profile
from fugaku_gpt.jobs.render import JobScript, render_job

GOLDEN = Path(__file__).parent / "golden"
A64FX = Profile(name="a64fx", python="/home/apps/torch-1.10/bin/python3", cores=48)
PLAIN = Profile(name="plain", python="/opt/torch/bin/python3")
UNPACKED = Profile(name="unpacked", python="torch-1.10/bin/python3", modules=("lang/tcsds-1.2.38",), cores=48)
FUGAKU = ["job.group=hp190122", "job.resource_group=small", "job.elapse=1:00:00", "job.volumes=[/vol0004]"]
FOUR_RANKS = ["layout.dp=4", "node.ranks_per_node=4", "training.global_batch=1024"]
ODD = ['job.environment=["SAID=it\'s $(date) `id` \\"so\\" ; rm -rf ~ & ÄÖ雪"]', 'job.transfer=["a b/$(x)\'y.so"]']


def _wide(nodes: int) -> List[str]:
    return [f"layout.dp={4 * nodes}", f"job.nodes={nodes}", f"training.global_batch={4 * nodes}"]


_ALL = [
    "layout.tp=4", "layout.dp=13824", "training.global_batch=13824", "job.shape=24x24x24", "job.allocation=torus",
    "job.strict=strict-io", "job.group=hp190122", "job.resource_group=large", "job.resource_unit=rscunit_ft01",
    "job.elapse=24:00:00", "job.node_memory=23Gi", "job.rank_map=bychip:XYZ", "job.statistics=nodes",
    "job.volumes=[/vol0004, /vol0005]", "job.local_tmp=40Gi", "job.shared_tmp=20Gi", "job.llio=[async-close=on]",
    "job.transfer=[/vol0004/lib/libmy.so]", "job.transfer_dirs=[/vol0004/lib]", "job.tarball=/vol0004/torch.tar",
    "job.environment=[TOFU_6D=xya]", "node.freq_mhz=2000", "node.eco_state=0", "node.retention_state=0",
    "node.throttling_state=0", "node.issue_state=0", "node.ex_pipe_state=0", "node.tcmalloc=true",
    "node.preload=[/vol0004/lib/libmy.so]", "node.open_files=65536",
]  # fmt: skip

# name → (preset, profile, overrides)
CASES: Dict[str, Tuple[str, Profile, List[str]]] = {
    "pjm-one-node": ("124m", A64FX, [*FUGAKU, *FOUR_RANKS]),
    "pjm-boost-eco": ("124m", A64FX, [*FUGAKU, *FOUR_RANKS, "node.freq_mhz=2200", "node.eco_state=2"]),
    "pjm-normal-clock": ("124m", A64FX, [*FUGAKU, *FOUR_RANKS, "node.freq_mhz=2000"]),
    "pjm-retention-off": ("124m", A64FX, [*FUGAKU, *FOUR_RANKS, "node.retention_state=0"]),
    "pjm-other-knobs": (
        "124m", A64FX,
        [*FUGAKU, *FOUR_RANKS, "node.throttling_state=5", "node.issue_state=1", "node.ex_pipe_state=1"],
    ),
    "pjm-tcmalloc": ("124m", A64FX, [*FUGAKU, *FOUR_RANKS, "node.tcmalloc=true"]),
    "pjm-preload-chain": (
        "124m", A64FX, [*FUGAKU, *FOUR_RANKS, "node.tcmalloc=true", "node.preload=[/vol0004/a.so, b.so]"],
    ),
    "pjm-large-pages": (
        "124m", A64FX,
        [*FUGAKU, *FOUR_RANKS, "node.large_pages=hugetlbfs", "node.paging_policy=demand:demand:demand",
         "node.arena_lock=0"],
    ),
    "pjm-open-files": ("124m", A64FX, [*FUGAKU, *FOUR_RANKS, "node.open_files=8192"]),
    "pjm-one-rank-a-node": ("124m", A64FX, [*FUGAKU, "job.nodes=2", "layout.dp=2", "training.global_batch=64"]),
    "pjm-local-tmp": ("124m", A64FX, [*FUGAKU, *FOUR_RANKS, "job.local_tmp=30Gi", "job.shared_tmp=10Gi"]),
    "pjm-tarball": (
        "124m", UNPACKED, [*FUGAKU, *FOUR_RANKS, "job.local_tmp=30Gi", "job.tarball=/vol0004/torch-1.10.tar"],
    ),
    "pjm-transfer": (
        "124m", A64FX, [*FUGAKU, *FOUR_RANKS, "job.transfer=[/vol0004/a.so, b.so]", "job.transfer_dirs=[lib]"],
    ),
    "pjm-rank-map": ("124m", A64FX, [*FUGAKU, *_wide(24), "job.shape=2x3x4", "job.rank_map=bynode:YZX"]),
    "pjm-statistics-of-nodes": ("124m", A64FX, [*FUGAKU, *FOUR_RANKS, "job.statistics=nodes"]),
    "pjm-accepted-finding": (
        "124m", A64FX, [*FUGAKU, *_wide(512), "job.resource_group=large", "job.accept_findings=[PJM032]"],
    ),
    "pjm-elapse-range": ("124m", A64FX, [*FUGAKU, *FOUR_RANKS, "job.elapse_min=30:00"]),
    "pjm-bulk": ("124m", A64FX, [*FUGAKU, *FOUR_RANKS, "job.bulk=0-9"]),
    "pjm-chain": ("124m", A64FX, [*FUGAKU, *FOUR_RANKS, "job.chain=4"]),
    "pjm-384-nodes": (
        "350m", UNPACKED,
        [*FUGAKU, *_wide(384), "job.shape=8x6x8", "job.local_tmp=30Gi", "job.tarball=/vol0004/torch-1.10.tar"],
    ),
    "pjm-everything-13824-nodes": ("1.3b", UNPACKED, _ALL),
    "pjm-harmless": ("124m", A64FX, [*FUGAKU, *FOUR_RANKS, *ODD]),
    "slurm-two-nodes": (
        "124m", PLAIN,
        ["job.scheduler=slurm", "job.nodes=2", "layout.dp=8", "training.global_batch=64", "job.elapse=1:00:00",
         "job.group=hp190122", "job.resource_group=cpu", "node.threads_per_rank=12", "node.tcmalloc=true"],
    ),
    "slurm-bulk": ("124m", PLAIN, ["job.scheduler=slurm", *FOUR_RANKS, "job.bulk=0-9", "job.elapse=30:00"]),
    "slurm-chain": ("124m", PLAIN, ["job.scheduler=slurm", *FOUR_RANKS, "job.chain=3", "job.elapse=30:00"]),
    "slurm-everything-13824-nodes": ("1.3b", UNPACKED, [*_ALL, "job.scheduler=slurm"]),
    "slurm-harmless": ("124m", PLAIN, ["job.scheduler=slurm", *FOUR_RANKS, *ODD]),
    "local-two-ranks": ("tiny", PLAIN, ["job.scheduler=local", "layout.dp=2", "node.tcmalloc=true"]),
    "local-tarball": (
        "tiny", UNPACKED, ["job.scheduler=local", "layout.dp=2", "job.tarball=torch.tar", "node.eco_state=2"],
    ),
    "local-harmless": ("tiny", PLAIN, ["job.scheduler=local", "layout.dp=2", *ODD]),
}  # fmt: skip


@functools.lru_cache(maxsize=None)
def config_of(case: str) -> RunConfig:
    """Return the configuration of a case."""
    preset, _, overrides = CASES[case]
    return load_run_config(preset=preset, overrides=overrides)


@functools.lru_cache(maxsize=None)
def rendered(case: str) -> JobScript:
    """Return the script of a case."""
    return render_job(config_of(case), CASES[case][1])


if __name__ == "__main__":
    for old in GOLDEN.glob("*.sh"):
        old.unlink()
    for name in CASES:
        (GOLDEN / f"{name}.sh").write_text(rendered(name).text, encoding="utf-8")

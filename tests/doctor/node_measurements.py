"""Measurements of a healthy A64FX node, as ranks leave them; tests change what they are about."""

from __future__ import annotations

from typing import Any, Dict

from fugaku_gpt.machine.local import A64FX
from tests.support.recorded import CORE_MEMORY_GROUPS

NO_PRODUCTS: Dict[str, Any] = {"problem": "", "verdicts": []}


def healthy_a64fx() -> Dict[str, Any]:
    """Four ranks of 12 threads, each bound to a core-memory group, at 2000 MHz with both pipes."""
    ranks = [
        {
            "rank": rank,
            "host": "a01",
            "affinity": list(cores),
            "numa_nodes": [node],
            "memory_nodes": [],
            "threads": 12,
            "bound": "by the launcher",
            "allocator": "libc",
        }
        for rank, (node, cores) in enumerate(CORE_MEMORY_GROUPS.items())
    ]
    host = {
        "host": "a01",
        "processor": A64FX,
        "page_bytes": 65536,
        "memory_limit_bytes": 30_739_333_120,
        "sve_bits": 512,
        "numa_nodes": {
            str(node): {"cores": list(cores), "memory_bytes": 8_372_879_360}
            for node, cores in CORE_MEMORY_GROUPS.items()
        },
        "power": {"freq": "2000", "eco_state": "0", "retention_state": "1"},
        "settings": {"OMP_NUM_THREADS": "12", "XOS_MMM_L_HPAGE_TYPE": "hugetlbfs"},
        "huge_pages": 0,
    }
    rates = {
        "host": "a01",
        "cores": 48,
        "clock_hertz": {"12": 1.999e9, "24": 2.0e9, "36": 2.0e9, "48": 2.0e9},
        "multiply_add_flops": 6.1e12,
        "triad": "our kernels",
        "bandwidth": {"4": 180e9, "5": 180e9, "6": 181e9, "7": 179e9, "all": 715e9},
    }
    build = {"torch": "1.13.1", "blas": "SSL2", "instruction_set": "DEFAULT"}
    mpi = {"library": "FUJITSU MPI", "thread_level": "funneled", "mpi4py": "4.1.2"}
    return {
        "section": "",
        "environment": {"ranks": ranks, "build": build, "mpi": mpi, "system": "Linux aarch64", "notes": []},
        "hosts": [host],
        "kernels": {"problem": "", "lanes": 16},
        "rates": [rates],
        "all_reduce": [{"bytes": 8, "seconds": 2e-6, "spread": 0.1}, {"bytes": 2**20, "seconds": 1e-3, "spread": 0.1}],
        "step": {
            "model": "124M",
            "settings": {"layout.dp": 4},
            "iterations": 3,
            "seconds": [1.2, 1.0, 1.1],
            "tokens_per_second": 3723.6,
            "tflops_exact": 3.2,
            "tflops_notes": 3.0,
            "loss": 10.9,
        },
    }

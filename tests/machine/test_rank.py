"""Tests of the rank that a launcher has given a process."""

from __future__ import annotations

from fugaku_gpt.machine.rank import rank_from_environment


def test_the_rank_is_read_from_the_launchers_variables_only() -> None:
    assert rank_from_environment({"PMI_RANK": "3", "PMI_SIZE": "8"}) == (3, 8)
    assert rank_from_environment({"OMPI_COMM_WORLD_RANK": "0", "OMPI_COMM_WORLD_SIZE": "2", "PMIX_RANK": "0"}) == (0, 2)
    assert rank_from_environment({"PMIX_RANK": "1", "SLURM_NTASKS": "4"}) == (1, 4)
    assert rank_from_environment({"SLURM_PROCID": "0", "SLURM_NTASKS": "4"}) is None  # a batch script, not a rank
    assert rank_from_environment({"PMI_RANK": "x", "PMI_SIZE": "8"}) is None
    assert rank_from_environment({}) is None

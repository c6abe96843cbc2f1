"""Tests of the rank that a launcher has given a process."""

from __future__ import annotations

from fugaku_gpt.machine.rank import launched_rank, without_launch_variables


def test_the_rank_is_read_from_the_launchers_variables_only() -> None:
    assert launched_rank({"PMI_RANK": "3", "PMI_SIZE": "8"}) == (3, 8, ("PMI_RANK", "PMI_SIZE"))
    assert (launched_rank({"OMPI_COMM_WORLD_RANK": "0", "OMPI_COMM_WORLD_SIZE": "2", "PMIX_RANK": "0"}) or ())[:2] == (
        0,
        2,
    )
    assert (launched_rank({"PMIX_RANK": "1", "SLURM_NTASKS": "4"}) or ())[:2] == (1, 4)
    assert launched_rank({"SLURM_PROCID": "0", "SLURM_NTASKS": "4"}) is None  # a batch script, not a rank
    assert launched_rank({"PMI_RANK": "x", "PMI_SIZE": "8"}) is None
    assert launched_rank({"PMIX_RANK": "1"}) is None
    assert launched_rank({}) is None


def test_fujitsus_mpiexec_tells_the_rank_and_goes_before_a_launcher_behind_it() -> None:
    fujitsu = {"PMIX_RANK": "5", "PLE_RANK_ON_NODE": "1"}
    assert launched_rank(fujitsu) == (5, None, ("PMIX_RANK", "PLE_RANK_ON_NODE"))
    assert (launched_rank({**fujitsu, "PMI_RANK": "5", "PMI_SIZE": "8"}) or ())[:2] == (5, None)


def test_variables_of_a_rank_are_removed_and_nothing_else() -> None:
    kept = {
        "PATH": "/bin",
        "OMPI_MCA_btl": "tcp,self",
        "OMPI_ALLOW_RUN_AS_ROOT": "1",
        "PMIXED": "1",
        "PMIX_MCA_gds": "hash",
        "PRTE_MCA_plm": "ssh",
        "SLURM_JOB_ID": "7",
        "PJM_JOBID": "7",
        "MPIR_CVAR_CH4_NETMOD": "ofi",
    }
    launch = {
        "OMPI_COMM_WORLD_RANK": "1",
        "OMPI_COMM_WORLD_LOCAL_SIZE": "2",
        "OMPI_UNIVERSE_SIZE": "2",
        "OMPI_MCA_ess_base_jobid": "1",
        "OMPI_MCA_orte_hnp_uri": "x",
        "PMIX_NAMESPACE": "a",
        "PMIX_RANK": "1",
        "PMI_FD": "9",
        "PMI_SIZE": "2",
        "PRTE_LAUNCHED": "1",
        "HYDI_CONTROL_FD": "8",
        "MPI_LOCALRANKID": "1",
        "PLE_RANK_ON_NODE": "1",
        "HYDRA_IFACE": "nope0",
        "HYDRA_HOST_FILE": "hosts",
        "MPIEXEC_TIMEOUT": "5",
    }
    assert without_launch_variables({**kept, **launch}) == kept

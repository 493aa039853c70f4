"""Which launcher started this process: torchrun, srun, ours, or none."""

from __future__ import annotations

import pytest

from phalanx.engines.launch import LAUNCHER_VARIABLE, rank_environment
from phalanx.engines.placed import first_host, placed
from phalanx.errors import WorldError

TORCHRUN = {
    "RANK": "5",
    "WORLD_SIZE": "8",
    "LOCAL_RANK": "1",
    "LOCAL_WORLD_SIZE": "4",
    "MASTER_ADDR": "web1",
    "MASTER_PORT": "29500",
}
SRUN = {
    "SLURM_JOB_ID": "1234567",
    "SLURM_STEP_NUM_TASKS": "7",
    "SLURM_PROCID": "6",
    "SLURM_LOCALID": "0",
    "SLURM_NODEID": "2",
    "SLURM_STEP_TASKS_PER_NODE": "3(x2),1",
    "SLURM_STEP_NODELIST": "web[03-04],db1",
}


def test_torchrun_places_a_process():
    found = placed(TORCHRUN)
    assert (found.rank, found.num_ranks, found.local_rank, found.num_local_ranks) == (5, 8, 1, 4)
    environment: dict[str, str] = {}
    found.adopt(environment)
    assert environment.items() >= TORCHRUN.items()


def test_srun_places_a_process_and_all_ranks_agree_where_to_meet():
    found = placed(SRUN)
    assert (found.rank, found.num_ranks, found.local_rank, found.num_local_ranks) == (6, 7, 0, 1)
    other = placed(SRUN | {"SLURM_PROCID": "0", "SLURM_NODEID": "0"})
    assert other.num_local_ranks == 3
    assert (found.address, found.port) == (other.address, other.port) and found.address == "web03"
    assert 1024 < found.port < 32768


@pytest.mark.parametrize(
    "environment",
    [
        {},
        {"RANK": "0", "WORLD_SIZE": "2"},  # left over in a shell
        SRUN | {"SLURM_STEP_NUM_TASKS": ""},  # a batch script: it is no task of a step
        {"SLURM_JOB_ID": "1", "SLURM_PROCID": "0", "SLURM_NTASKS": "8"},
        TORCHRUN | {LAUNCHER_VARIABLE: "1"},  # our own rank
    ],
)
def test_no_launcher_is_seen_where_there_is_none(environment):
    assert placed(environment) is None


@pytest.mark.parametrize("bad", [{"RANK": "8"}, {"RANK": "x"}, {"LOCAL_RANK": "-1"}])
def test_variables_that_cannot_be_are_refused(bad):
    with pytest.raises(WorldError, match="environment"):
        placed(TORCHRUN | bad)


@pytest.mark.parametrize(
    ("nodes", "first"),
    [("n1", "n1"), ("n1,n2", "n1"), ("a[1,3],b", "a1"), ("r1-n[008-9]", "r1-n008")],
)
def test_the_first_host_of_slurms_short_lists(nodes, first):
    assert first_host(nodes) == first


def test_ranks_see_nothing_of_an_outer_launcher():
    outer = TORCHRUN | SRUN | {"TORCHELASTIC_USE_AGENT_STORE": "True", "PATH": "/bin"}
    kept = rank_environment(outer)
    assert kept["PATH"] == "/bin" and kept["RES_OPTIONS"]
    assert not any(name.startswith(("SLURM", "TORCHELASTIC")) for name in kept)

"""Bad input that no other test takes the whole way: a code, one clear line, exit code 2.

Unknown keys and policies, illegal units and axis sizes that do not multiply are held by
`tests/cli/test_plan_and_simulate.py`.
"""

from __future__ import annotations

import os
import signal
import time
from collections.abc import Callable

import pytest

from phalanx.action import Collective, Compute, Program
from phalanx.cli import main
from phalanx.drive import drive
from phalanx.errors import PhalanxError, PlanError
from phalanx.mesh import Mesh
from phalanx.plan import Plan, Pool, RoleProgram
from phalanx.policy import Step
from phalanx.worlds.dist import DistWorld
from tests.contract.scenarios import of_shape
from tests.ranks import DIED, current_store, run_ranks
from tests.worlds import programs

TOY = "examples/toy-4d.toml"
Lists = list[list[Step]]


def refused(capsys, *argv: str) -> tuple[str, str]:
    """Code and the one line of a command that must end with 2."""
    exit_code = main(argv)
    lines = capsys.readouterr().err.splitlines()
    assert exit_code == 2, lines
    heads = [line for line in lines if line.startswith("error[")]
    assert len(heads) == 1 and lines[0] == heads[0], "the error comes first, and once"
    code, _, sentence = heads[0].removeprefix("error[").partition("]: ")
    return code, sentence


# ---- a schedule that lacks an action or has it twice --------------------------------------------


def without_last(lists: Lists) -> Lists:
    return [steps[:-1] for steps in lists]


def without_last_of_first_rank(lists: Lists) -> Lists:
    return [lists[0][:-1], *lists[1:]]


def with_first_twice(lists: Lists) -> Lists:
    return [[lists[0][0], *lists[0]], *lists[1:]]


@pytest.mark.parametrize(
    ("damage", "code", "says"),
    [
        (without_last, "order/missing", "is missing"),
        (without_last_of_first_rank, "order/missing", "is missing"),
        (with_first_twice, "order/doubled", "comes twice"),
    ],
)
@pytest.mark.parametrize("grain", ["operator", "stage"])
def test_an_incomplete_schedule_is_refused_with_its_grid(
    capsys, monkeypatch, grain: str, damage: Callable[[Lists], Lists], code, says
):
    entry = next(entry for entry in of_shape("order") if entry.family == "pipeline")
    whole = entry.cls.order
    monkeypatch.setattr(entry.cls, "order", lambda self, p, m: damage(whole(self, p, m)))
    plan = ["--plan.pipeline", entry.name, "--plan.grain", grain]
    if grain == "stage":
        plan += ["--plan.mesh", "{pp=2}", "--plan.data=''", "--plan.tensor=''", "--on=2xh100"]
    found, sentence = refused(capsys, "plan", TOY, *plan)
    assert found == code and says in sentence and "rank 0, slot" in sentence


# ---- ranks that disagree on a collective ---------------------------------------------------------


def test_ranks_that_order_collectives_differently_are_refused_by_name(capsys):
    flags = ["--plan.mesh", "{pp=2}", "--plan.data", "{name='fsdp', axis='pp'}"]
    flags += ["--plan.pipeline", "gpipe", "--plan.tensor=''", "--on", "2xh100"]
    code, sentence = refused(capsys, "plan", TOY, *flags, "--model.layers=7")
    assert code == "check/collective"
    assert sentence.startswith("ranks 0 and 1 = ") and "of their group on axis pp" in sentence


# ---- a plan for other hardware -------------------------------------------------------------------


def test_a_plan_for_other_hardware_is_refused_in_one_line(tmp_path):
    program = RoleProgram(pool="all", mesh={"shard": 2})
    pools = {"all": Pool(machine="h100", devices=(0, 1))}
    hardware = {"machine": "h100", "num_devices": 2}
    plan = Plan(job="x", job_key="k", hardware=hardware, pools=pools, programs={"train": program})
    plan.save(tmp_path / "plan.json")
    with pytest.raises(PlanError) as caught:
        Plan.load(tmp_path / "plan.json").require_here({"machine": "a100-80g", "num_devices": 2})
    error = caught.value
    assert (error.code, error.exit_code) == ("plan/hardware", 2)
    assert error.sentence() == (
        "hardware.machine = a100-80g: the plan was made for 'h100'; plan the job again here"
    )


# ---- a world whose rank dies or hangs ------------------------------------------------------------


def strike(rank: int, world_size: int, kind: int) -> tuple[str, int, str, str, float] | None:
    """Rank 1 is struck by a signal between two collectives; what rank 0 then says, and when."""
    mesh, store = Mesh(dp=world_size), current_store()
    store.set(f"pid/{rank}", str(os.getpid()))

    def struck(context, action) -> None:
        if context.rank == 1:
            os.kill(os.getpid(), kind)

    total = {"collective": "all_reduce", "axis": "dp", "tensor": "x"}
    actions = [
        Compute(op="fill"),
        Collective(**total, payload_bytes=programs.MESSAGE_BYTES, label="one"),
        Compute(op="struck"),
        Collective(**total, payload_bytes=programs.MESSAGE_BYTES, label="two"),
    ]
    world = DistWorld(mesh, programs.OPS | {"struck": struck}, rank, store, timeout_s=1.5)
    began_s = time.monotonic()
    try:
        drive(world, program=Program.alike(mesh, actions))
    except PhalanxError as error:
        took_s = time.monotonic() - began_s
        if kind == signal.SIGSTOP:  # a stopped process answers nobody, not even `run_ranks`
            os.kill(int(store.get("pid/1")), signal.SIGKILL)
        return error.code, error.exit_code, error.sentence().splitlines()[0], error.detail, took_s
    return None


@pytest.mark.dist
@pytest.mark.parametrize(
    ("kind", "code"),
    [(signal.SIGKILL, "world/dead"), (signal.SIGSTOP, "world/timeout")],
    ids=["dies", "hangs"],
)
def test_a_rank_that_dies_or_hangs_is_named_with_its_last_collective(kind, code):
    answer, gone = run_ranks(strike, 2, kind, backend=None, may_die=(1,))
    assert gone == DIED
    found, exit_code, line, detail, took_s = answer
    assert (found, exit_code) == (code, 2)
    assert line.startswith("rank 1: ") and "all_reduce two of rank 0" in line
    assert "rank 1 last took part in all_reduce one" in detail
    assert took_s < 8.0

"""Policies of `[plan]` become tables of the lockfile: family, name, options."""

import pytest

from phalanx.errors import JobError
from phalanx.job import load_job, parse_flags
from phalanx.mesh import Mesh
from phalanx.planner.make import policy_tables

MESH = Mesh(pp=2, shard=2)


def tables(*flags):
    return policy_tables(load_job(None, parse_flags(["--model.name=toy", *flags])), MESH)


def test_names_and_tables_mean_the_same():
    named = tables("--plan.data=fsdp", "--plan.pipeline=1f1b")
    assert named == tables("--plan.data=[{name='fsdp'}]", "--plan.pipeline={name='1f1b'}")
    assert named == (
        {"family": "pipeline", "name": "1f1b"},
        [{"family": "data", "name": "fsdp"}],
    )


@pytest.mark.parametrize(
    "flag",
    ["--plan.data={name='megatron', family='tensor'}", "--plan.pipeline.family=data"],
)
def test_a_table_cannot_move_to_another_family(flag):
    with pytest.raises(JobError) as caught:
        tables("--plan.pipeline=1f1b", flag)
    assert caught.value.code == "job/unknown-key" and caught.value.where.endswith(".family")

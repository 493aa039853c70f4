"""Plans of other programs priced, and the best plan as files."""

from dataclasses import replace

import pytest

from phalanx.cli._plan_ask import Asked
from phalanx.errors import PhalanxError
from phalanx.hardware import Cluster
from phalanx.job import load_job
from phalanx.planner.clusters import AskedCluster
from phalanx.planner.given import given_plan
from phalanx.planner.importers import ForeignPlan
from phalanx.planner.lockfile import foreign_files, lockfile
from phalanx.planner.price import price_job
from phalanx.planner.priced_job import PricedJob
from phalanx.planner.question import Question
from phalanx.planner.search import answer
from tests.planner.plan_cases import asked, training

SHARDED = ForeignPlan(
    kind="accelerate", method="full", zero=3, shard=-1, micro_rows=1, num_micro=2, row_tokens=512,
    recompute="full",
)  # fmt: skip


def priced(**changes) -> PricedJob:
    flags = {"model.name": "qwen3-8b", "train.method": "full", "train.steps": 10}
    flags |= {"train.global_batch_tokens": 64 * 4096}
    return price_job(load_job(None, flags | changes), Question(on="8xh100", seq_tokens=4096))


def test_a_file_s_plan_is_priced_and_its_distance_to_the_best_is_told():
    best = answer(training("full"), asked(4))
    found = given_plan(SHARDED, best)
    assert found.fits and found.plan.sized.row["shard"] == 4 and found.plan.sized.row["zero"] == 3
    assert found.plan.total_s >= best.fastest.low_s
    assert any("recomputation full ->" in change for change in found.changes)
    table = found.to_dict()
    assert table["step_s"] == found.plan.total_s and table["peak_bytes"] > 0


def test_the_best_plan_given_as_a_file_needs_no_change():
    best = answer(training("full"), asked(4), must_run=True)
    row = best.best.sized.row
    same = ForeignPlan(
        kind="accelerate", method="full", tensor=int(row["tensor"]), zero=int(row["zero"]),
        shard=int(row["shard"]), keeps_gathered=bool(row["keeps_gathered"]),
        sequence_parallel=bool(row["sequence_parallel"]), micro_rows=1,
        num_micro=int(row["num_micro"]), row_tokens=best.best.sized.row_limit,
        recompute=best.best.sized.recompute,
    )  # fmt: skip
    wanted = [each for each in given_plan(same, best).changes if "tokens" not in each]
    assert wanted == []


def test_rows_that_are_not_packed_are_as_long_as_the_longest_of_a_micro_batch():
    best = answer(training("full"), asked(4))
    rows = {
        packed: given_plan(replace(SHARDED, packed=packed, micro_rows=4), best).plan
        for packed in (True, False)
    }
    assert rows[True].sized.row["row_tokens"] == 512
    assert 80 <= rows[False].sized.row["row_tokens"] <= 220  # of 25 to 220 tokens


def test_a_plan_that_cannot_be_laid_on_a_cluster_says_why():
    found = given_plan(replace(SHARDED, tensor=3), answer(training("full"), asked(4)))
    assert found.plan is None and not found.fits and "multiple" in found.changes[0]
    assert found.to_dict()["fits"] is False


def test_the_lockfile_holds_the_best_plan_that_runs():
    found = priced()
    lock = lockfile(found, found.best)
    role = lock.programs["train"]
    assert role.grid().size == 8 and role.built_specs()
    assert role.batch["row_tokens"] == found.best.runnable.sized.row_limit
    by_name = {row["quantity"]: row["value"] for row in lock.predictions}
    assert by_name["training/step time"] == found.best.runnable.total_s


def test_other_programs_get_the_best_plan_that_they_have_words_for():
    found = priced()
    plan, files = foreign_files(found, found.best, "trl")
    assert plan.sized.row["tensor"] == plan.sized.row["pipeline"] == 1 and files
    assert plan.total_s >= found.best.fastest.total_s
    plan, files = foreign_files(found, found.best, "torchtitan")
    assert len(files) == 1 and plan is found.best.best
    with pytest.raises(PhalanxError, match="serve"):
        foreign_files(found, found.best, "vllm")


def test_weights_in_host_memory_leave_the_device_and_cross_the_link(tmp_path):
    """70B of 4 bits on two cards of 24 GB, as FSDP with QLoRA is known for: 34.7 GiB of weights."""
    text = (
        "base_model: llama-3.1-70b\nload_in_4bit: true\nadapter: qlora\nlora_r: 8\n"
        "sequence_len: 512\nmicro_batch_size: 1\ngradient_accumulation_steps: 4\n"
        "gradient_checkpointing: true\nfsdp: [full_shard]\nfsdp_config:\n"
        "  fsdp_sharding_strategy: FULL_SHARD\n"
    )
    away, here = (_priced(tmp_path, text + more) for more in ("  fsdp_offload_params: true\n", ""))
    weights, gradients = (here.plan.sized.terms[name] for name in ("weights", "gradients"))
    assert weights == pytest.approx(34.7 / 2 * 2**30, rel=0.02)
    assert away.plan.sized.terms["weights"] == 0
    moments = here.plan.sized.terms["moments"]
    assert away.plan.sized.host_bytes == pytest.approx(weights + gradients + moments)
    assert away.plan.total_s > here.plan.total_s and away.plan.high_s > away.plan.total_s
    assert away.changes[-1] == "weights in host memory yes -> no"


def test_host_memory_has_a_limit_too():
    where = asked(2)
    away = replace(SHARDED, offload=1.0, offloads_weights=True)
    assert given_plan(away, answer(training("full"), where)).fits
    host = replace(where.cluster.machine.memory, value=2.0**20)
    small = Cluster(replace(where.cluster.machine, host_memory=host), 2)
    given = given_plan(away, answer(training("full"), AskedCluster("small", small)))
    assert given.plan.sized.peak_bytes < given.answer.limit_bytes
    assert given.plan.sized.host_bytes > given.host_limit_bytes == 2**20 and not given.fits


def test_plans_of_other_batches_are_compared_by_the_token(tmp_path):
    """A file says what a device computes: on twice the devices a step has twice the tokens."""
    text = (
        "base_model: llama-3.1-8b\nsequence_len: 4096\nmicro_batch_size: 2\n"
        "gradient_accumulation_steps: 4\ngradient_checkpointing: true\nfsdp_version: 2\n"
        "fsdp_config:\n  reshard_after_forward: true\n"
    )
    both = [_priced(tmp_path, text, on) for on in ("8xh100,16xh100", "16xh100,8xh100")]
    tokens = 2 * 4 * 4096
    for given in both:
        number = given.answer.asked.cluster.num_devices
        assert given.answer.training.batch_tokens == given.step_tokens == number * tokens
    first, second = _all_priced(tmp_path, text, "8xh100,16xh100")
    assert not first.has_other_batch and second.has_other_batch
    assert second.step_tokens == 2 * first.step_tokens
    assert second.gain_frac == pytest.approx(both[1].gain_frac, abs=0.05)


def _priced(folder, text, on="2xrtx4090", seq=""):
    return _all_priced(folder, text, on, seq)[0]


def _all_priced(folder, text, on, seq=""):
    file = folder / "axolotl.yaml"
    file.write_text(text)
    asked = Asked("", "", "", on, [])
    asked.method(None, False, "")
    asked.rows(seq, "", "")
    asked.read(str(file))
    question = asked.question(precision="", base_bits=0, software="")
    return price_job(asked.job(), question).given


def test_rows_that_are_asked_for_are_those_of_the_file_s_plan_too(tmp_path):
    text = "base_model: llama-3.1-8b\nadapter: lora\nlora_r: 8\nmicro_batch_size: 2\n"
    text += "sequence_len: 2000\ngradient_checkpointing: true\n"
    own, longer = (_priced(tmp_path, text, "2xh100", seq) for seq in ("", "4096"))
    assert own.plan.sized.row["row_tokens"] == 2000 and own.step_tokens == 2 * 2 * 2000
    assert longer.plan.sized.row["row_tokens"] == 4096 and longer.step_tokens == 2 * 2 * 4096
    assert not longer.has_other_batch
    assert longer.plan.sized.peak_bytes > own.plan.sized.peak_bytes

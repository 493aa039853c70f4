"""Summaries of runs: the same on every layout, and the first difference is found where it is.

R rows, C columns.
"""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path

import pytest
import torch
import torch.distributed as dist

from phalanx.analyze.first_divergence import TOLERANCE, Recorded, compare, read_recorded
from phalanx.cli import main
from phalanx.engines.fingerprint import NUM_SIGNS, Fingerprints, summary_of
from phalanx.engines.optim import ShardedAdamW
from phalanx.errors import JobError, PlanError
from phalanx.models.spec import small_config
from phalanx.ops.dropout import DropoutKey
from phalanx.worlds.logged_group import init_logged
from tests.engines.tensor_cases import (
    FSDP,
    MEGATRON,
    REPLICATE,
    SEQUENCE,
    Case,
    build,
    cpu_process,
    num_counted,
    rows_of,
)
from tests.ranks import current_store, run_ranks

CONFIG = small_config(
    vocab_size=31, hidden_size=18, intermediate_size=20, num_layers=3, num_heads=4, num_kv_heads=2,
    head_dim=6, window=3, full_every=2, dtype="float64", init_std=0.2,
)  # fmt: skip
ONE = Case(config=CONFIG, mesh={"shard": 1}, specs=(FSDP,), steps=2)
LAYOUTS = {
    "fsdp 2": replace(ONE, mesh={"shard": 2}),
    "replicate 2": replace(ONE, mesh={"replicate": 2}, specs=(REPLICATE,)),
    "tp 2": replace(ONE, mesh={"tp": 2}, specs=(MEGATRON,)),
    "tp 2, tokens split": replace(ONE, mesh={"shard": 1, "tp": 2}, specs=(FSDP, SEQUENCE)),
    "layers again": replace(ONE, mesh={"replicate": 2}, specs=(REPLICATE,), recompute="full"),
}


# ---- of a tensor ---------------------------------------------------------------------------------


def drawn(num_rows: int = 40, num_columns: int = 7, seed: int = 0) -> torch.Tensor:
    generator = torch.Generator().manual_seed(seed)
    return torch.randn(num_rows, num_columns, generator=generator, dtype=torch.float64)


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16])
def test_parts_in_any_order_add_up_to_the_whole(dtype):
    x_RC, keys_R = drawn().to(dtype), torch.arange(40)
    whole = summary_of(x_RC, keys_R)
    order_R = torch.randperm(40, generator=torch.Generator().manual_seed(1))
    parts = [summary_of(x_RC[at], keys_R[at]) for at in order_R.split(11)]
    total = parts[0] + parts[1] + parts[2] + parts[3]
    assert (total.bits, total.count) == (whole.bits, whole.count)
    assert total.squares == pytest.approx(whole.squares, rel=1e-12)
    assert total.signs == pytest.approx(whole.signs, rel=1e-9, abs=1e-9)
    assert whole.norm == pytest.approx(float(x_RC.double().norm()), rel=1e-12)


def test_filler_rows_do_not_count():
    x_RC, keys_R = drawn(), torch.arange(40)
    keys_R[30:] = -5
    assert summary_of(x_RC, keys_R) == summary_of(x_RC[:30], keys_R[:30])


@pytest.mark.parametrize("change", ["a bit", "two rows swapped", "two columns swapped"])
def test_any_change_changes_the_bits(change):
    x_RC, keys_R = drawn(), torch.arange(40)
    other_RC = x_RC.clone()
    if change == "a bit":
        other_RC[3, 2] = torch.nextafter(x_RC[3, 2], torch.tensor(9.0, dtype=torch.float64))
    elif change == "two rows swapped":
        other_RC[[1, 2]] = x_RC[[2, 1]]
    else:
        other_RC[:, [1, 2]] = x_RC[:, [2, 1]]
    assert summary_of(x_RC, keys_R).bits != summary_of(other_RC, keys_R).bits


def test_minus_zero_is_zero():
    zero_RC = torch.zeros(3, 2)
    assert summary_of(zero_RC, torch.arange(3)) == summary_of(-zero_RC, torch.arange(3))


def test_the_distance_is_estimated_within_its_spread():
    x_RC, keys_R = drawn(400, 30), torch.arange(400)
    spread = (2 / NUM_SIGNS) ** 0.5 / 2  # of the root
    for seed in range(1, 6):
        noise_RC = 1e-6 * drawn(400, 30, seed)
        true = float(noise_RC.norm() / x_RC.norm())
        found = summary_of(x_RC, keys_R).distance(summary_of(x_RC + noise_RC, keys_R))
        assert abs(found / true - 1.0) < 4 * spread


def test_the_distance_of_a_rank_one_difference_is_estimated_within_its_wider_spread():
    """Signs are products of a row's and a column's, which such a difference does not mix."""
    x_RC, keys_R = drawn(400, 30), torch.arange(400)
    spread = (8 / NUM_SIGNS) ** 0.5 / 2
    for seed in range(1, 9):
        noise_RC = 1e-6 * drawn(400, 1, seed) @ drawn(1, 30, seed + 50)
        true = float(noise_RC.norm() / x_RC.norm())
        found = summary_of(x_RC, keys_R).distance(summary_of(x_RC + noise_RC, keys_R))
        assert abs(found / true - 1.0) < 3 * spread


# ---- of a run ------------------------------------------------------------------------------------


def record(rank: int, world_size: int, cases: dict[str, tuple[Case, str, bool]]) -> None:
    """Train each case for its steps, with summaries in its folder; `wrong` spoils a gradient."""
    init_logged("gloo", dist.PrefixStore("logged", current_store()), rank, world_size)
    for case, folder, wrong in cases.values():
        train_recorded(rank, world_size, case, Path(folder), wrong)


def train_recorded(rank: int, world_size: int, case: Case, folder: Path, wrong: bool) -> None:
    model = build(case, cpu_process(rank, world_size, case))
    optimizer = ShardedAdamW(model.data.named_held(model.decoder.named_parameters()))
    record = Fingerprints(model, rank, folder, case.steps)
    for step in range(case.steps):
        mine = rows_of(case, step)[model.data.rank :: model.data.num_ranks]
        with record.step(step):
            for item, row in enumerate(mine):
                model.data.begin_item(item, len(mine))
                row = row.extended(model.row_multiple)
                places_S = torch.from_numpy(row.global_tokens_S)
                hidden_SD = model.decoder(
                    torch.from_numpy(row.tokens_S),
                    torch.from_numpy(row.positions_S),
                    row.document_starts,
                    dropout=DropoutKey(0, step, places_S),
                )
                counted_N, targets_N = map(torch.from_numpy, (row.counted_N, row.targets_N))
                loss = model.loss(hidden_SD, counted_N, targets_N, num_counted(case, step))
                (loss * 1.001 if wrong and step == 1 else loss).backward()
            model.finish_step()
            record.gradients()
            optimizer.step(case.lr)
        model.data.finish_update()


@pytest.fixture(scope="module")
def folders(tmp_path_factory) -> dict[str, Path]:
    """A recording of each layout, of one process twice, and of one that goes wrong in step 2."""
    base = tmp_path_factory.mktemp("recorded")
    singles = {"one": (ONE, False), "again": (ONE, False), "wrong": (ONE, True)}
    both = {name: (case, False) for name, case in LAYOUTS.items()}
    found = {}
    for size, cases in ((1, singles), (2, both)):
        task = {}
        for name, (case, wrong) in cases.items():
            found[name] = base / name.replace(" ", "").replace(",", "")
            found[name].mkdir()
            task[name] = (case, str(found[name]), wrong)
        run_ranks(record, size, task, backend=None)
    return found


@pytest.mark.dist
def test_the_same_run_twice_is_equal_bit_by_bit(folders, capsys):
    found = compare(read_recorded(folders["one"]), read_recorded(folders["again"]))
    assert not found.differences and not found.only
    layers, weights = CONFIG.num_layers + 2, len(read_weights(folders["one"]))
    assert found.num_places == 2 * (2 * layers + 2 * weights)
    assert main(["trace", "diverge", str(folders["one"]), str(folders["again"])]) == 0
    assert "equal bit for bit" in capsys.readouterr().out


def read_weights(folder: Path) -> set[str]:
    return {name for _, phase, name in read_recorded(folder).places if phase == "W"}


@pytest.mark.dist
@pytest.mark.parametrize("name", LAYOUTS)
def test_layouts_have_the_same_summaries_but_for_rounding(folders, name):
    one, other = read_recorded(folders["one"]), read_recorded(folders[name])
    found = compare(one, other)
    assert found.num_places == len(one.places) == len(other.places)
    assert found.tolerance == TOLERANCE["float64"] and found.first_large is None
    first = [place for place in one.places if place[0] == 1 and place[1] == "W"]
    assert all(one.places[place] == other.places[place] for place in first)
    for place, summary in one.places.items():
        assert other.places[place].squares == pytest.approx(summary.squares, rel=1e-8), place


@pytest.mark.dist
def test_the_first_difference_is_where_the_fault_was_made(folders, capsys):
    one, wrong = read_recorded(folders["one"]), read_recorded(folders["wrong"])
    first = compare(one, wrong).first
    assert (first.step, first.phase, first.name) == (2, "B", "model.norm")
    assert first.distance == pytest.approx(1e-3, rel=1.0)
    words = ["trace", "diverge", str(folders["one"]), str(folders["wrong"])]
    assert main(words) == 1
    out = capsys.readouterr().out
    assert (
        "first above 1e-09 (weights behind an update 3.2e-05): step 2, backward of model.norm"
        in out
    )
    assert main([*words, "--tolerance", "0.1", "--json", "-"]) == 0
    document = json.loads(capsys.readouterr().out)
    assert document["first"]["name"] == "model.norm" and document["first_large"] is None


@pytest.mark.dist
def test_a_fault_under_another_layout_is_found_above_its_rounding(folders):
    tensor, wrong = read_recorded(folders["tp 2"]), read_recorded(folders["wrong"])
    first = compare(tensor, wrong).first_large
    assert (first.step, first.phase, first.name) == (2, "B", "model.norm")


def test_what_cannot_be_compared_is_told(tmp_path):
    with pytest.raises(JobError, match="record_steps"):
        read_recorded(tmp_path)
    summary = summary_of(drawn(), torch.arange(40))
    early = Recorded("a", "float64", {(1, "F", "model.norm"): summary})
    late = Recorded("b", "float64", {(2, "F", "model.norm"): summary})
    with pytest.raises(PlanError, match="no step in common"):
        compare(early, late)
    (tmp_path / "fingerprints").mkdir()
    file = tmp_path / "fingerprints" / "rank0.jsonl"
    file.write_text('{"format_version": 1, "dtype": "float32", "threads": 1}\n{"step": 1}\n')
    with pytest.raises(JobError, match="not what Phalanx wrote"):
        read_recorded(tmp_path)
    file.write_text('{"format_version": 7, "dtype": "float32"}\n')
    with pytest.raises(PlanError, match="another format"):
        read_recorded(tmp_path)


def test_other_numbers_of_tokens_are_a_difference():
    few, many = (summary_of(drawn(n), torch.arange(n)) for n in (30, 40))
    runs = [Recorded("r", "float32", {(1, "F", "model.norm"): each}) for each in (few, many)]
    first = compare(*runs).first
    assert first.distance == float("inf") and first.counts == (210, 280)

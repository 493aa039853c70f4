"""Training of rows that ranks share equals training in one process, and exchanges what was lowered.

Small decoders in float64, with packed documents, sliding windows and fewer key than query heads;
rows are filled up where ranks cannot share them evenly.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from functools import cache
from typing import Any

import pytest
import torch
import torch.distributed as dist

from phalanx.action import Collective
from phalanx.cost import collectives
from phalanx.engines.bind_context import bind_context
from phalanx.errors import PlanError
from phalanx.lower import lower
from phalanx.mesh import Mesh
from phalanx.models.spec import LoraSpec, small_config
from phalanx.planner.work import model_work
from phalanx.policies.context.ring import Ring
from phalanx.policy import Rule, Spec
from phalanx.registry import build as build_policy
from phalanx.worlds.comm_log import CommLog
from phalanx.worlds.logged_group import device_mesh, init_logged
from tests.engines.tensor_cases import (
    FSDP,
    REPLICATE,
    SEQUENCE,
    Case,
    Outcome,
    bound_loss,
    build,
    cpu_process,
    rows_of,
    train_cases,
    train_plain,
)
from tests.models.families import TABLES, tiny_config
from tests.ranks import current_store, run_ranks

CONFIG = small_config(
    vocab_size=31, hidden_size=18, intermediate_size=20, num_layers=3, num_heads=4, num_kv_heads=2,
    head_dim=6, window=3, full_every=2, dtype="float64", init_std=0.2, logit_soft_cap=4.0,
)  # fmt: skip
DROPPED = LoraSpec(rank=3, alpha=7.0, dropout=0.3)
CP = {"cp": 2}


def context(name: str, layout: str = "head_tail", **options: Any) -> dict[str, Any]:
    return {"family": "context", "name": name, "layout": layout} | options


RING, GATHERED, HEADS = context("ring"), context("all_gather"), context("ulysses", "contiguous")
FULL = Case(config=CONFIG, mesh=CP, specs=(RING,), steps=3)
CASES = {
    "ring": replace(FULL, steps=10),
    "ring, striped": replace(FULL, specs=(context("ring", "striped"),)),
    "ring, blocks": replace(FULL, specs=(context("ring", "contiguous"),)),
    "gathered": replace(FULL, specs=(GATHERED,)),
    "ring, windows round it too": replace(FULL, specs=(RING | {"halo": False},)),
    "gathered, by document": replace(FULL, specs=(context("all_gather", "per_document"),)),
    "gathered, balanced": replace(FULL, specs=(context("all_gather", "balanced"),)),
    "heads": replace(FULL, specs=(HEADS,)),
    "layers again": replace(FULL, recompute="full"),
    "norms again": replace(FULL, recompute="selective", specs=(GATHERED,)),
    "dropout": replace(FULL, lora=DROPPED),
    "sharded over tokens": replace(FULL, mesh={"shard": 1, "cp": 2}, specs=(FSDP, RING)),
} | {name: replace(FULL, config=tiny_config(name, dtype="float64")) for name in TABLES}
FOURS = {
    "sharded": replace(FULL, mesh={"shard": 2, "cp": 2}, specs=(FSDP, RING)),
    "replicas": replace(FULL, mesh={"replicate": 2, "cp": 2}, specs=(REPLICATE, GATHERED)),
    "tokens of a tensor group": replace(FULL, mesh={"cp": 2, "tp": 2}, specs=(SEQUENCE, RING)),
    "heads in a ring": replace(
        FULL, mesh={"cp": 2, "heads": 2}, specs=(RING, HEADS | {"axis": "heads"})
    ),
}


@cache
def plain(name: str) -> Outcome:
    return train_plain((CASES | FOURS)[name])


@pytest.fixture(scope="module")
def outcomes() -> dict[str, list[Outcome]]:
    """By case, of every rank; one launch per world size."""
    found: dict[str, list[Outcome]] = {}
    for size, cases in ((2, CASES), (4, FOURS)):
        ranks = run_ranks(train_cases, size, list(cases.values()), backend=None, timeout_s=200.0)
        found |= {name: [each[at] for each in ranks] for at, name in enumerate(cases)}
    return found


@pytest.mark.dist
@pytest.mark.parametrize("name", [*CASES, *FOURS])
def test_ranks_that_share_rows_train_as_one_process(outcomes, name):
    expected = plain(name)
    for found in outcomes[name]:
        assert not found.changed
        assert found.losses[0] == pytest.approx(expected.losses[0], rel=1e-12)
        for kind in ("losses", "norms"):
            values, wanted = (torch.tensor(getattr(each, kind)) for each in (found, expected))
            torch.testing.assert_close(values, wanted, rtol=1e-9, atol=1e-12, msg=kind)
        assert found.weights.keys() == expected.weights.keys()
        for weight, value in expected.weights.items():
            torch.testing.assert_close(
                found.weights[weight], value, rtol=1e-9, atol=1e-9, msg=weight
            )


# ---- what is exchanged ---------------------------------------------------------------------------

SINGLE = replace(CONFIG, dtype="float32")
WHOLE = {"halo": False}
EXCHANGED = {"ring": RING | WHOLE, "gathered": GATHERED | WHOLE, "heads": HEADS, "halo": GATHERED}


def exchanges(rank: int, world_size: int) -> dict[str, list[tuple[str, int, float]]]:
    """Of each way the rows of the log on the context axis, and their bytes on the wire."""
    init_logged("gloo", dist.PrefixStore("logged", current_store()), rank, world_size)
    found = {}
    for name, spec in EXCHANGED.items():
        case = Case(config=SINGLE, mesh=CP, specs=(spec,), rows=((16,), (12,)))
        model = build(case, cpu_process(rank, world_size, case))
        log = CommLog(rank)
        for at, row in enumerate(rows := rows_of(case, 0)):
            model.data.begin_item(at, len(rows))
            loss = None
            with log.step(2 * at):
                loss = bound_loss(model, case, row, 0)
            with log.step(2 * at + 1):
                loss.backward()
        model.finish_step()
        rows = [row for row in log.rows if row.axis == "cp"]
        found[name] = [(row.kind, row.payload_bytes, row.wire_bytes) for row in rows]
    return found


def planned(spec: dict[str, Any], phase: str = "FB") -> list[tuple[str, int, float]]:
    options = {key: value for key, value in spec.items() if key != "family"}
    policies = [build_policy("context", options)]
    program = lower(
        model_work(SINGLE, (16, 12)), Mesh(CP), build_policy("pipeline", "gpipe"), policies
    )
    return [
        (
            a.collective,
            int(a.payload_bytes),
            collectives.wire_bytes(a.collective, a.payload_bytes, 2),
        )
        for a in program.of(0)
        if isinstance(a, Collective) and a.axis == "cp" and a.phase in phase
    ]


@pytest.mark.dist
def test_what_attention_exchanges_is_what_was_lowered():
    """Gathers and exchanges of heads one by one; a ring, whose messages the lowered step joins, by
    the bytes that a rank sends."""
    for found in run_ranks(exchanges, 2, backend=None):
        for name in ("gathered", "heads", "halo"):
            of_attention = [row for row in found[name] if row[0] != "all_reduce"]
            assert sorted(of_attention) == sorted(planned(EXCHANGED[name])), name
        sent = sum(wire for kind, _, wire in found["ring"] if kind == "send")
        assert sent == sum(wire for *_, wire in planned(EXCHANGED["ring"]))


# ---- what is refused -----------------------------------------------------------------------------


class Odd(Ring):
    """A rule that nothing carries out."""

    def rules(self) -> tuple[Rule, ...]:
        *others, attention = super().rules()
        return (*others, replace(attention, placement="broadcast"))


def told(rank: int, world_size: int, asked: Sequence[tuple[Sequence[Spec], int]]) -> list[str]:
    mesh, found = device_mesh("cpu", Mesh(cp=2, heads=2)), []
    for specs, tensor_degree in asked:
        with pytest.raises(PlanError) as caught:
            bind_context(specs, mesh, CONFIG, tensor_degree)
        found.append(f"{caught.value.code}: {caught.value}")
    return found


@pytest.mark.dist
def test_what_cannot_be_shared_is_refused():
    ring, heads = build_policy("context", "ring"), build_policy("context", "ulysses")
    asked = {
        "the mesh has no such axis": ([replace(ring, axis="seq")], 1),
        "two axes share rows where one of them exchanges heads": (
            [ring, replace(ring, axis="heads")],
            1,
        ),
        "is no way in which ranks share a row": ([Odd()], 1),
        "cannot share 1 query and 1 key/value heads": ([heads], 4),
    }
    found = run_ranks(told, 4, list(asked.values()))[0]
    for rule, text in zip(asked, found):
        assert rule in text

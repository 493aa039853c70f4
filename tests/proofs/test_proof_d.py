"""Proof d: an outer sync, fragmented and overlapped with the inner steps, in all worlds.

N elements of one fragment, flat.
"""

from __future__ import annotations

import time
from collections.abc import Sequence
from math import inf

import pytest
import torch
from torch.nn.functional import mse_loss

from phalanx.action import Compute, Program
from phalanx.cost.table import TableCost
from phalanx.drive import drive
from phalanx.engines.sync import OuterSync, strided_fragments
from phalanx.mesh import Mesh
from phalanx.policies.sync.streaming import Streaming
from phalanx.trace import Trace
from phalanx.worlds.dist import DistWorld
from phalanx.worlds.local import LocalWorld
from phalanx.worlds.sim import SimWorld
from tests.ranks import current_store, run_ranks

STEP_S = 0.03  # at least; an exchange is shorter
NOTICE_S = 0.01  # from the end of an exchange until the world can have heard of it
OUTER = ["outer.delta", "all_reduce", "outer.apply"]


def inner_program(size: int) -> Program:
    """One inner step; everything that an island does in it is one op here."""
    return Program.alike(Mesh(island=size), [Compute(op="inner", label="inner")])


# ---- in virtual time ---------------------------------------------------------------------------


def simulate(
    policy: Streaming, sizes: Sequence[int], num_steps: int, seconds: dict[str, float], size=2
) -> Trace:
    world = SimWorld(Mesh(island=size), TableCost(seconds), facts={"fragment_bytes": sizes})
    return drive(world, program=inner_program(size), num_steps=num_steps, reacts=[policy])


def spans(trace: Trace, operators: Sequence[str]) -> list[tuple[str, float, float]]:
    of_rank = trace.where(rank=0)
    rows = [row for row in of_rank.rows() if row["operator"] in operators]
    return [(row["action_id"], row["start_s"], row["start_s"] + row["dur_s"]) for row in rows]


def test_the_exchange_runs_beside_the_next_inner_steps():
    """H = 4, P = 2, tau = 1; inner step 10 s, delta 1 s, exchange 7 s, apply 2 s."""
    policy = Streaming(inner_steps=4, num_fragments=2, overlap_steps=1, blend=0.5)
    seconds = {"inner": 10, "outer.delta": 1, "all_reduce": 7, "outer.apply": 2}
    trace = simulate(policy, (12, 20), 9, seconds)
    assert spans(trace, OUTER) == [
        ("delta.0@4", 40, 41),
        ("exchange.0@4", 41, 48),  # inside inner step 5, 41..51
        ("apply.0@4", 51, 53),
        ("delta.1@6", 63, 64),
        ("exchange.1@6", 64, 71),
        ("apply.1@6", 74, 76),
        ("delta.0@8", 86, 87),
        ("exchange.0@8", 87, 94),
        ("apply.0@8", 97, 99),
    ]
    assert [start for _, start, _ in spans(trace, ["inner"])] == [
        *(0, 10, 20, 30, 41, 53, 64, 76, 87)
    ]
    assert trace.end_s == 9 * 10 + 3 * (1 + 2), "no second of the exchanges is waited for"


def test_without_overlap_every_exchange_is_waited_for():
    policy = Streaming(inner_steps=4, num_fragments=2)
    seconds = {"inner": 10, "outer.delta": 1, "all_reduce": 7, "outer.apply": 2}
    assert simulate(policy, (12, 20), 9, seconds).end_s == 9 * 10 + 3 * (1 + 7 + 2)


def test_an_exchange_longer_than_tau_steps_delays_only_its_apply():
    policy = Streaming(inner_steps=4, overlap_steps=2)
    seconds = {"inner": 10, "outer.delta": 0, "all_reduce": 25, "outer.apply": 0}
    trace = simulate(policy, (12,), 7, seconds)
    assert spans(trace, ["outer.apply"]) == [("apply.0@4", 65, 65)]
    assert trace.end_s == 75


# ---- with real tensors -------------------------------------------------------------------------


def make_model() -> torch.nn.Module:
    """Identical on all islands, whatever their seed."""
    with torch.random.fork_rng():
        torch.manual_seed(11)
        model = torch.nn.Module()
        model.embed = torch.nn.Linear(3, 5)
        model.layers = torch.nn.ModuleList(torch.nn.Linear(5, 5) for _ in range(3))
        model.head = torch.nn.Linear(5, 2)
    return model


def forward(model: torch.nn.Module, x_BD: torch.Tensor) -> torch.Tensor:
    x_BD = model.embed(x_BD)
    for layer in model.layers:
        x_BD = x_BD + torch.tanh(layer(x_BD))
    return model.head(x_BD)


def loss_of(model: torch.nn.Module, rank: int, step: int) -> torch.Tensor:
    source = torch.Generator().manual_seed(100 * rank + step)
    x_BD = torch.randn(7, 3, generator=source)
    y_BC = torch.randn(7, 2, generator=source)
    return mse_loss(forward(model, x_BD), y_BC)


class Island:
    """A model with its inner optimizer on a data shard of its own."""

    def __init__(self, rank: int, optimizer: type = torch.optim.AdamW) -> None:
        self.rank, self.steps = rank, 0
        self.model = make_model()
        self.inner = optimizer(self.model.parameters(), lr=1e-2)

    @property
    def params(self) -> dict[str, torch.Tensor]:
        return dict(self.model.named_parameters())

    def step(self) -> None:
        self.steps += 1
        self.inner.zero_grad()
        loss_of(self.model, self.rank, self.steps).backward()
        self.inner.step()

    def flat(self, names: Sequence[str] | None = None) -> torch.Tensor:
        chosen = self.params if names is None else {n: self.params[n] for n in names}
        return torch.cat([p.detach().reshape(-1) for p in chosen.values()])

    def overwrite(self, names: Sequence[str], flat_N: torch.Tensor) -> None:
        params = [self.params[name] for name in names]
        for p, piece in zip(params, flat_N.split([p.numel() for p in params])):
            p.data.copy_(piece.view(p.shape))


def run_streaming(
    rank: int, world_size: int, options: dict, num_steps: int, step_s: float = 0.0
) -> dict:
    policy, island = Streaming(**options), Island(rank)
    fragments = strided_fragments(list(island.params), policy.num_fragments)
    sync = OuterSync(island.params, fragments)

    def inner(context, action) -> None:
        island.step()
        time.sleep(step_s)

    world = DistWorld(
        Mesh(island=world_size),
        sync.ops | {"inner": inner},
        rank,
        current_store(),
        timeout_s=30.0,
        facts=sync.facts,
    )
    trace = drive(world, program=inner_program(world_size), num_steps=num_steps, reacts=[policy])
    return {
        "params": island.flat(),
        "outer": [fragment.outer_N for fragment in sync.fragments],
        "log": trace.log(rank, [*OUTER, "inner"]),
        "rows": list(trace.rows()),
        "sizes": sync.facts["fragment_bytes"],
    }


def run_plain_diloco(rank: int, world_size: int, inner_steps: int, num_steps: int) -> dict:
    """The reference: arXiv 2311.08105, Algorithm 1, with torch's own optimizer and all-reduce."""
    island = Island(rank)
    outer = torch.nn.Parameter(island.flat())
    sgd = torch.optim.SGD([outer], lr=0.7, momentum=0.9, nesterov=True)
    for step in range(1, num_steps + 1):
        island.step()
        if step % inner_steps == 0:
            delta_N = outer.detach() - island.flat()
            torch.distributed.all_reduce(delta_N)
            outer.grad = delta_N / world_size
            sgd.step()
            island.overwrite(list(island.params), outer.detach())
    return {"params": island.flat(), "outer": [outer.detach()]}


def evaluate_offline(world_size: int, options: dict, num_steps: int) -> list[dict]:
    """The reference: arXiv 2501.18512, Algorithm 2, all islands in turn, written as printed."""
    H, P = options["inner_steps"], options["num_fragments"]
    tau, alpha, eta, mu = (
        options[name] for name in ("overlap_steps", "blend", "outer_lr", "outer_momentum")
    )
    islands = [Island(rank) for rank in range(world_size)]
    fragments = strided_fragments(list(islands[0].params), P)
    outer = [islands[0].flat(names) for names in fragments]
    buffer = [torch.zeros_like(each) for each in outer]
    sent: dict[int, torch.Tensor] = {}
    for t in range(1, num_steps + 1):
        for island in islands:
            island.step()
        for p, names in enumerate(fragments):
            since = t - p * H // P
            if since >= H and since % H == 0:
                deltas = [outer[p] - island.flat(names) for island in islands]
                sent[p] = sum(deltas) / world_size
            if since - tau >= H and (since - tau) % H == 0:
                buffer[p] = mu * buffer[p] + sent[p]
                outer[p] = outer[p] - eta * (sent[p] + mu * buffer[p])
                for island in islands:
                    mixed = alpha * island.flat(names) + (1 - alpha) * outer[p]
                    island.overwrite(names, mixed)
    return [{"params": island.flat(), "outer": outer} for island in islands]


def run_alone(rank: int, num_steps: int) -> torch.Tensor:
    island = Island(rank)
    for _ in range(num_steps):
        island.step()
    return island.flat()


@pytest.mark.dist
@pytest.mark.parametrize("size", [1, 2, 3])
def test_one_fragment_without_overlap_is_diloco_bit_for_bit(size):
    options = {"inner_steps": 3, "outer_lr": 0.7}
    ours = run_ranks(run_streaming, size, options, 7)
    theirs = run_ranks(run_plain_diloco, size, 3, 7)
    for mine, reference in zip(ours, theirs):
        assert torch.equal(mine["params"], reference["params"])
        assert torch.equal(mine["outer"][0], reference["outer"][0])


@pytest.mark.dist
def test_blend_one_equals_independent_replicas_bit_for_bit():
    options = {"inner_steps": 3, "num_fragments": 2, "overlap_steps": 1, "blend": 1.0}
    for rank, result in enumerate(run_ranks(run_streaming, 2, options, 8)):
        assert torch.equal(result["params"], run_alone(rank, 8))


def assert_overlapped(rows: list[dict]) -> None:
    """Each exchange starts before the inner step that follows its delta or, where the exchange
    before it is still under way then, the end of that one; its apply starts after its end."""
    lane_free_s = -inf
    for at, row in enumerate(rows):
        if row["operator"] == "all_reduce":
            end_s = row["start_s"] + row["dur_s"]
            steps = [r["start_s"] for r in rows[at:] if r["operator"] == "inner"]
            free = [start_s for start_s in steps if start_s > lane_free_s + NOTICE_S]
            assert row["start_s"] <= (free or [inf])[0]
            name = row["action_id"].replace("exchange", "apply")
            for apply in (r for r in rows[at:] if r["action_id"] == name):
                assert steps[0] < apply["start_s"] >= end_s
            lane_free_s = end_s


@pytest.mark.dist
@pytest.mark.parametrize(("size", "blend", "tau"), [(2, 0.5, 1), (3, 0.0, 2)])
def test_overlap_equals_the_printed_algorithm(size, blend, tau):
    options = {"inner_steps": 5, "num_fragments": 3, "overlap_steps": tau, "blend": blend}
    options |= {"outer_lr": 0.4, "outer_momentum": 0.9}
    results = run_ranks(run_streaming, size, options, 17, STEP_S)
    for result, reference in zip(results, evaluate_offline(size, options, 17)):
        assert (result["params"] - reference["params"]).abs().max() <= 1e-6
        for ours, theirs in zip(result["outer"], reference["outer"]):
            assert (ours - theirs).abs().max() <= 1e-6
    assert any(not torch.equal(r["params"], run_alone(i, 17)) for i, r in enumerate(results))

    simulated = simulate(
        Streaming(**options), results[0]["sizes"], 17, dict.fromkeys([*OUTER, "inner"], 1), size
    )
    for rank, result in enumerate(results):
        assert result["log"] == simulated.log(rank, [*OUTER, "inner"])

    for result in results:
        assert_overlapped(result["rows"])
    for result in results:  # steps 6..10: every fragment once
        sent = {row["action_id"]: row for row in result["rows"]}
        period = [sent[f"exchange.{label}"] for label in ("1@6", "2@8", "0@10")]
        sizes = result["sizes"]
        assert [row["payload_bytes"] for row in period] == [sizes[1], sizes[2], sizes[0]]
        assert sum(sizes) == 4 * result["params"].numel(), "as without fragments"
        assert [row["wire_bytes"] for row in period] == pytest.approx(
            [2 * row["payload_bytes"] * (size - 1) / size for row in period]
        )


def test_one_inner_sgd_step_and_plain_averaging_is_data_parallelism():
    """All islands in one process: H = 1, inner SGD, outer SGD with rate 1 (arXiv 2311.08105)."""
    size, num_steps = 4, 20
    policy = Streaming(inner_steps=1, outer_lr=1.0, outer_momentum=0.0)
    islands = [Island(rank, torch.optim.SGD) for rank in range(size)]
    syncs = [OuterSync(each.params, [list(each.params)]) for each in islands]
    ops = {
        "inner": lambda context, action: islands[context.rank].step(),
        "outer.delta": lambda context, action: syncs[context.rank].ops[action.op](context, action),
        "outer.apply": lambda context, action: syncs[context.rank].ops[action.op](context, action),
    }
    world = LocalWorld(Mesh(island=size), ops, facts=syncs[0].facts)
    drive(world, program=inner_program(size), num_steps=num_steps, reacts=[policy])

    together = make_model()
    sgd = torch.optim.SGD(together.parameters(), lr=1e-2)
    for step in range(1, num_steps + 1):
        sgd.zero_grad()
        sum(loss_of(together, rank, step) / size for rank in range(size)).backward()
        sgd.step()
    for island in islands:
        for name, p in together.named_parameters():
            assert (island.params[name] - p).abs().max() <= 1e-6

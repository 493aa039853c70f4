"""How long planning a layout change of Llama 3 405B takes on one core.

    python benchmarks/reshard.py --json FILE

Each case builds both layout tables of all 1,138 tensors, plans, and sums bytes per rank and link.
Exits with 1 when a case needs more than 2 s, or when the planned bytes are not those that the
target ranks hold.
"""

from __future__ import annotations

import sys
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass
from math import prod
from statistics import median
from time import process_time

from gated import main

from phalanx.layout import Layout, Only, Shard
from phalanx.mesh import Mesh
from phalanx.report import Report
from phalanx.reshard import Reshard, plan_reshard

LIMIT_S = 2.0
ITEMSIZE = 2  # bf16
NUM_LAYERS, HEADS, KV_HEADS, D, F, V = 126, 128, 8, 16384, 53248, 128256
KV_ROWS = D // HEADS * KV_HEADS
PUBLISHED_PARAMETERS = 405_853_388_800  # safetensors total of meta-llama/Llama-3.1-405B

# canonical name -> shape, and the dim and units that tensor parallelism cuts
LAYER: dict[str, tuple[tuple[int, ...], int | None, int]] = {
    "self_attn.q_proj": ((D, D), 0, HEADS),
    "self_attn.k_proj": ((KV_ROWS, D), 0, KV_HEADS),
    "self_attn.v_proj": ((KV_ROWS, D), 0, KV_HEADS),
    "self_attn.o_proj": ((D, D), 1, HEADS),
    "mlp.gate_proj": ((F, D), 0, F),
    "mlp.up_proj": ((F, D), 0, F),
    "mlp.down_proj": ((D, F), 1, F),
    "input_layernorm": ((D,), None, 1),
    "post_attention_layernorm": ((D,), None, 1),
}
ENDS: dict[str, tuple[tuple[int, ...], int | None, int]] = {
    "model.embed_tokens": ((V, D), 0, V),
    "model.norm": ((D,), None, 1),
    "lm_head": ((V, D), 0, V),
}


def layout_table(mesh: Mesh) -> dict[str, Layout]:
    """All tensors on any mesh of axes pp, tp, shard; other axes replicate."""
    stages = mesh.degree("pp")

    def lay(name: str, stage: int, shape: tuple[int, ...], dim: int | None, units: int) -> Layout:
        placements: list[Shard | Only] = []
        if "pp" in mesh.names:
            placements.append(Only("pp", stage))
        if dim is not None and "tp" in mesh.names:
            placements.append(Shard(dim, "tp", units=units, rule="repeat"))
        if "shard" in mesh.names:
            placements.append(Shard(0, "shard"))
        return Layout(shape, mesh, *placements, name=name)

    ends = zip(ENDS.items(), (0, stages - 1, stages - 1))
    table = {f"{name}.weight": lay(name, stage, *how) for (name, how), stage in ends}
    for layer in range(NUM_LAYERS):
        for part, how in LAYER.items():
            name = f"model.layers.{layer}.{part}.weight"
            table[name] = lay(name, layer * stages // NUM_LAYERS, *how)
    return table


@dataclass(frozen=True)
class Case:
    """A layout change and the ranks on which the target lives (from `first_target_rank` on)."""

    name: str
    source: Mesh
    target: Mesh
    first_target_rank: int = 0

    def plan(self) -> tuple[Reshard, dict[str, Layout]]:
        target = layout_table(self.target)
        first = self.first_target_rank
        reshard = plan_reshard(
            layout_table(self.source),
            target,
            ITEMSIZE,
            target_ranks=range(first, first + self.target.size),
            host_of=lambda rank: rank // 8,
        )
        _ = reshard.sent_bytes, reshard.received_bytes, reshard.kept_bytes, reshard.link_bytes
        return reshard, target


TRAIN = Mesh(shard=64, tp=8)
CASES = (
    Case("FSDP 64 x TP 8 to PP 4 x TP 8 x 16 replicas", TRAIN, Mesh(pp=4, replica=16, tp=8)),
    Case("PP 4 x TP 8 x 16 replicas to FSDP 64 x TP 8", Mesh(pp=4, replica=16, tp=8), TRAIN),
    Case("FSDP 64 x TP 8 to TP 16 x 32 replicas", TRAIN, Mesh(replica=32, tp=16)),
    Case("the same to 512 other ranks", TRAIN, Mesh(replica=32, tp=16), first_target_rank=512),
    Case("HSDP 8 x 8 x TP 8 to TP 16 x 32", Mesh(copy=8, shard=8, tp=8), Mesh(rep=32, tp=16)),
)


def measured_s(work: Callable[[], object], repeats: int = 3) -> float:
    """Median processor time: what one core needs, whatever else runs on the machine."""
    times = []
    for _ in range(repeats):
        begin = process_time()
        work()
        times.append(process_time() - begin)
    return median(times)


def held_bytes(table: dict[str, Layout]) -> int:
    """Bytes that all ranks hold together, rank by rank."""
    return sum(
        count * sum(layout.num_bytes(rank, ITEMSIZE) for rank in range(layout.mesh.size))
        for layout, count in Counter(table.values()).items()
    )


def run() -> Report:
    """The report."""
    report = Report("Planning a layout change of Llama 3 405B")
    add_rows(report)
    return report


def add_rows(report: Report) -> None:
    """Rows of every case, for this and other benchmarks."""
    num_parameters = sum(prod(each.shape) for each in layout_table(Mesh()).values())
    target = {"target": PUBLISHED_PARAMETERS}
    report.add("parameters", num_parameters, "1", "formula", **target)
    for case in CASES:
        reshard, table = case.plan()
        gate = {"target": LIMIT_S, "bound": "below", "note": "processor time, median of 3"}
        report.add(f"{case.name}: plan", measured_s(case.plan), "s", "measured", **gate)
        rows = sum(len(moves.num_bytes) for moves in reshard.moves)
        report.add(f"{case.name}: table rows", rows, "1", "formula")
        fetched = reshard.network_bytes + reshard.local_bytes
        gate = {"target": held_bytes(table)}
        report.add(f"{case.name}: bytes fetched", fetched, "bytes", "formula", **gate)
        network = reshard.network_bytes
        report.add(f"{case.name}: bytes between ranks", network, "bytes", "formula")
        busiest = max(reshard.sent_bytes.values())
        ratio = busiest * len(reshard.source_ranks) / reshard.network_bytes
        report.add(f"{case.name}: busiest sender over mean", ratio, "1", "formula")


if __name__ == "__main__":
    sys.exit(main(run, __doc__))

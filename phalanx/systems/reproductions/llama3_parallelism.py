"""Llama 3 parallelism: the sizing of four axes, bubbles and free rounds of the interleaved order.

Gated: degrees by the inequalities of `planner.sizing`; bubbles and peaks of the real order, played;
layouts of tokens that share out the work of packed rows.
Throughput at 16,384 GPUs is priced by the planner and shown beside what was published; `phalanx lab
validate` scores the planner, so it gates nothing here.
"""

from __future__ import annotations

import numpy as np

from phalanx.cost.model_shape import shape_of
from phalanx.cost.training_formulas import bubble_frac, utilisation
from phalanx.cost.training_plans import SCHEDULES, TrainingPlans
from phalanx.cost.training_step import training_step
from phalanx.hardware import Cluster, parse_cluster
from phalanx.layout.token_layout import token_layout
from phalanx.models.named import named_model
from phalanx.planner.sizing import four_axes
from phalanx.registry import build
from phalanx.report import Report
from phalanx.systems._measured import measured
from phalanx.systems._published import Published, published
from phalanx.systems.reproductions._pictures import draw_schedule
from phalanx.worlds.pipeline_arrays import Played, play

_MODEL, _TOKENS, _PEAK = "llama-3.1-405b", 16 * 2**20, 989e12
_LONG_ROW, _BF16_BYTES = 131_072, 2
_SIZED = {8192: (8, 1, 16, 128), _LONG_ROW: (8, 16, 16, 8)}
_MEAN_DOCUMENT, _DRAWS = 1024, 10  # documents as those of figure 11
_CHUNKS, _RANKS = 8, 16  # one layer each; 8 is inferred: 15 / (16 8) is the 12 % of the text
_FORWARD_S, _BACKWARD_S = 1.0, 2.0
# items of a round -> idle over ideal time with a message of half a forward pass, chunks of rank 0
_FIGURE_9 = {4: (0.143, 31), 6: (0.048, 43), 12: (0.048, 79)}


def reproduce() -> Report:
    """Rows of DOI 10.1145/3695053.3731410 and arXiv 2407.21783 beside ours."""
    report = Report("Llama 3 parallelism (DOI 10.1145/3695053.3731410, arXiv 2407.21783)")
    _sizing(report)
    _bubbles(report)
    _rounds(report)
    _shared_rows(report)
    _throughput(report)
    report.rows += measured("llama3-parallelism")
    report.notes["not reproduced"] = (
        "context-parallel attention and its bandwidths (kernels on real links), balanced stages "
        "(the scaled-down model's size is not published), the multimodal encoder, the profile at "
        "8,192 GPUs"
    )
    return report


def _rows(experiment: str, metric: str, *words: str) -> list[Published]:
    return [
        row
        for row in published("llama3-parallelism")
        if (row.experiment, row.metric) == (experiment, metric)
        and all(word in row.configuration for word in words)
    ]


def _sizing(report: Report) -> None:
    cluster = parse_cluster("16384xh100")
    for seq, expected in _SIZED.items():
        found = four_axes(
            shape_of(named_model(_MODEL).config, _MODEL),
            cluster,
            step_tokens=_TOKENS,
            seq_tokens=seq,
        )
        degrees = (found.tensor, found.context, found.pipeline, found.data)
        for name, reason, value, target in zip(
            ("tensor", "context", "pipeline", "data"),
            (found.reasons[0], found.reasons[0], found.reasons[2], found.reasons[3]),
            degrees,
            expected,
        ):
            quantity = f"{name} degree, 405B, 16,384 H100, sequences of {seq:,}"
            report.add(quantity, float(value), "1", "formula", target=float(target), note=reason)
        report.notes[f"sizing, {seq:,} tokens"] = "; ".join(found.reasons)


def _played(ranks: int, virtual: int, per_round: int, items: int, p2p_s: float = 0.0) -> Played:
    order = build("pipeline", {"name": "interleaved", "virtual": virtual, "per_round": per_round})
    return play(order.order(ranks, items), _FORWARD_S, _BACKWARD_S, p2p_s)


def _bubbles(report: Report) -> None:
    for words, items in (("bs=pp", _RANKS), ("bs=2*pp", 2 * _RANKS)):
        said = _rows("pipeline bubble", "bubble ratio", words)[0]
        quantity = f"bubble over ideal time, 16 ranks, {words}"
        formula = float(bubble_frac(_RANKS, items, _CHUNKS))
        simulated = _played(_RANKS, _CHUNKS, 0, items).bubble_frac
        report.add(quantity, formula, "1", "formula")
        report.add(quantity, simulated, "1", "simulated", target=formula, tolerance=1e-9)
        report.rows.append(said.row(quantity, "1", 0.01))
        assert said.number is not None
        report.add(
            f"{quantity}, against what was printed",
            simulated,
            "1",
            "simulated",
            target=said.number / 100,
            tolerance=0.01,
            note="printed in whole percent",
        )
    uneven = _played(4, 2, 5, 5).bubble_frac
    report.add(
        "bubble over ideal time, 4 ranks, 2 chunks, 5 micro-batches in one round",
        uneven,
        "1",
        "simulated",
        target=float(bubble_frac(4, 5, 2)),
        tolerance=1e-9,
        note="any number of micro-batches",
    )


def _rounds(report: Report) -> None:
    """26 layers on 4 ranks, 7 chunks, 12 micro-batches: Figure 9's three schedules."""
    seconds, chunks = {}, {}
    for per_round, (idle, peak) in _FIGURE_9.items():
        played = _played(4, 7, per_round, 12, 0.5 * _FORWARD_S)
        seconds[per_round], chunks[per_round] = float(played.step_s.max()), played.peak_in_flight[0]
        where = f"4 ranks, 7 chunks, 12 micro-batches, {per_round} a round"
        note = "a message takes half a forward pass of a chunk"
        report.add(
            f"idle over ideal time, {where}",
            played.bubble_frac,
            "1",
            "simulated",
            target=idle,
            tolerance=0.0006,
            note=note,
        )
        report.add(
            f"chunks in memory, {where}", float(chunks[per_round]), "1", "simulated", target=peak
        )
    rates = {
        per_round: _rows("schedule comparison", "throughput per GPU", f"{per_round} per round")[0]
        for per_round in _FIGURE_9
    }
    for per_round in (6, 12):
        quantity = f"throughput, {per_round} a round / 4 a round"
        report.add(
            quantity,
            seconds[4] / seconds[per_round],
            "1",
            "simulated",
            target=1.0,
            bound="above",
            note="gate: the order alone; how long a message takes is an assumption",
        )
        numbers = rates[per_round].number, rates[4].number
        assert numbers[0] is not None and numbers[1] is not None
        report.add(quantity, numbers[0] / numbers[1], "1", "published", note=rates[4].source)


def _shared_rows(report: Report) -> None:
    """Context parallelism: what a rank gathers, and its work where rows are packed documents."""
    shape = shape_of(named_model(_MODEL).config, _MODEL)
    attention, (tensor, *_) = shape.layers[0].attention, _SIZED[_LONG_ROW]
    heads = attention.num_kv_heads / tensor
    gathered = 2 * _LONG_ROW * heads * attention.head_dim * _BF16_BYTES
    quantity = f"keys and values that a rank holds of a layer, 405B, sequences of {_LONG_ROW:,}"
    note = "one head of 128 channels of each: 512 bytes a token"
    report.add(quantity, gathered, "B", "formula", target=512.0 * _LONG_ROW, note=note)
    for ranks in (4, 16):
        for kind, most in (("head_tail", None), ("per_document", 1.1), ("balanced", 1.1)):
            quantity = f"work of the busiest rank over the mean, {ranks} ranks, {kind}"
            note = f"documents of {_MEAN_DOCUMENT:,} tokens on average, exponential; {_DRAWS} draws"
            gate = {} if most is None else {"target": most, "bound": "below"}
            found = float(np.mean([_imbalance(kind, ranks, seed) for seed in range(_DRAWS)]))
            report.add(quantity, found, "1", "simulated", note=note, **gate)


def _imbalance(kind: str, ranks: int, seed: int) -> float:
    """Pairs of the busiest rank over the mean, of a row of documents."""
    drawn = np.random.default_rng(seed).exponential(_MEAN_DOCUMENT, 4 * _LONG_ROW // _MEAN_DOCUMENT)
    ends = np.cumsum(np.maximum(1, drawn.astype(int)))
    bounds = np.array([0, *ends[ends < _LONG_ROW], _LONG_ROW])
    pairs_S = np.arange(_LONG_ROW) - np.repeat(bounds[:-1], np.diff(bounds)) + 1
    layout = token_layout(kind, _LONG_ROW, ranks, bounds.tolist())
    work = pairs_S[layout.tokens_Nc].sum(axis=1)
    return float(work.max() / work.mean())


def _throughput(report: Report) -> None:
    """Table 4's three rows as the planner prices them."""
    shape = shape_of(named_model(_MODEL).config, _MODEL)
    for row in _rows("end to end", "throughput per GPU"):
        sizes = dict(part.split("=") for part in row.configuration.split(";") if "=" in part)
        tensor, context, pipeline, data = (int(sizes[each]) for each in ("tp", "cp", "pp", "dp"))
        seq, num_micro = int(sizes["seq"]), int(sizes["bs per DP"])
        plans = TrainingPlans(
            tensor=tensor,
            context=context,
            pipeline=pipeline,
            data=data,
            shard=data * context,
            zero=1,
            virtual=_CHUNKS,
            schedule=SCHEDULES.index("interleaved"),
            sequence_parallel=1,
            row_tokens=seq,
            num_micro=num_micro,
            software="torch",
        )
        cluster = Cluster(parse_cluster("h100").machine, int(row.devices))
        step = training_step(shape, plans, cluster.machine)
        per_token = 3 * (
            shape.product_flops_per_token
            + shape.head_flops_per_token
            + shape.attention_flops(1, seq / 2)
        )
        flops = per_token * float(plans.step_tokens)
        reached = utilisation(flops, float(step.total_s.max()), cluster.num_devices, _PEAK)
        quantity = f"TFLOP/s per GPU, {row.devices} H100, sequences of {seq:,}"
        note = "priced by the planner, causal attention counted by half; no gate"
        report.add(quantity, reached * _PEAK / 1e12, "TFLOP/s", "formula", note=note)
        report.rows.append(row.row(quantity, "TFLOP/s"))


def draw(path: str) -> None:
    """Rounds of six micro-batches on four ranks."""
    draw_schedule({"name": "interleaved", "virtual": 2, "per_round": 6}, 4, 12, path)

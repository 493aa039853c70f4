"""How much longer published training steps took than `cost.cluster_step` says.

    python benchmarks/cluster_efficiency.py TRAINING.csv ACCELERATORS.csv OUT.json

Efficiency of a row = formula / published step time. The table that is written (it is kept as
phalanx/cost/efficiency.json) holds for each class the median of its sources' medians (one grid
would outvote all others) and the 10th and 90th percentile of its rows, each source weighing the
same. Nothing is fitted to a row, a model or a machine. A row counts when it names the sizes of a
dense decoder, a plan without pipeline, context or expert parallelism, and a machine that
`phalanx/hardware` knows; others are counted by reason.
"""

from __future__ import annotations

import json
import sys
from collections import Counter, defaultdict
from pathlib import Path

import numpy as np
import pandas as pd

from phalanx.cost.cluster_step import DeviceRates, operator_groups, step_seconds
from phalanx.cost.local_shapes import local_config
from phalanx.cost.step_memory import memory_terms, units_of
from phalanx.cost.training import Workload
from phalanx.errors import PhalanxError
from phalanx.hardware import read_machine
from phalanx.mesh import Mesh
from phalanx.models.config import DecoderConfig, parse_config
from phalanx.models.spec import LoraSpec, num_params
from phalanx.planner.clusters import device_rates
from phalanx.registry import build

LORA_RANK = 16
MACHINES = {
    "gb200": "gb200", "b300": "b300", "b200": "b200", "h200": "h200",
    "h100": "h100", "a100 sxm 40gb": "a100-40g", "a100": "a100-80g", "mi300x": "mi300x",
    "mi325x": "mi325x", "l40s": "l40s", "v5p": "v5p", "v5e": "v5e", "v6e": "v6e", "trillium": "v6e",
}  # fmt: skip
IN_ACCELERATORS = {
    "gb200": "GB200 NVL72", "b300": "B300 SXM", "b200": "B200 SXM 180GB", "h200": "H200 SXM 141GB",
    "h100": "H100 SXM 80GB",
}  # fmt: skip
_SIZES = "layers hidden heads ffn vocab seq_len_tokens n_devices global_batch_seqs".split()


class Unused(Exception):
    """Why a row does not count."""


def require(condition: bool, reason: str) -> None:
    """Raise `Unused` unless it holds."""
    if not condition:
        raise Unused(reason)


def machine_of(hardware: str) -> str:
    """Name of the machine file."""
    found = next((name for part, name in MACHINES.items() if part in hardware.lower()), "")
    require(bool(found), "machine without a file")
    return found


def config_of(row: pd.Series) -> DecoderConfig:
    """A decoder of the row's sizes; where its feed-forward has two matrices, one of the same size
    with three."""
    hidden, heads, ffn = int(row.hidden), int(row.heads), int(float(row.ffn))
    table = {
        "model_type": "llama", "dtype": "bfloat16", "vocab_size": int(row.vocab),
        "hidden_size": hidden, "num_hidden_layers": int(row.layers), "num_attention_heads": heads,
        "num_key_value_heads": int(row.kv_heads) if row.kv_heads == row.kv_heads else heads,
        "head_dim": hidden // heads, "tie_word_embeddings": False,
        "max_position_embeddings": max(4096, int(row.seq_len_tokens)),
    }  # fmt: skip
    as_wide = 128 * max(1, round(2 * ffn / 3 / 128))
    found = [parse_config(table | {"intermediate_size": f}) for f in (ffn, as_wide)]
    if row.params_b == row.params_b:
        return min(found, key=lambda each: abs(num_params(each) / 1e9 - row.params_b))
    return found[0] if ffn < 3.6 * hidden else found[1]


def number(value: float, default: int = 1) -> int:
    """A cell as a whole number."""
    return default if value != value else int(value)


def published_step_s(row: pd.Series, config: DecoderConfig) -> float:
    """Seconds of a step, from what the row prints."""
    tokens = row.global_batch_seqs * row.seq_len_tokens
    if row.step_time_s == row.step_time_s:
        return float(row.step_time_s)
    if row.tokens_per_s_per_device == row.tokens_per_s_per_device:
        return float(tokens / (row.tokens_per_s_per_device * row.n_devices))
    require(row.tflops_per_device == row.tflops_per_device, "no time")
    require("maxtext" in row.source_id, "TFLOPS of an unknown convention")
    # MaxText before 2025-07: 6 per parameter and attention in full, no recomputation
    attention = 12 * config.num_layers * config.hidden_size * row.seq_len_tokens
    flops = tokens * (6 * num_params(config) + attention)
    return float(flops / (row.tflops_per_device * 1e12 * row.n_devices))


def compared(row: pd.Series, fp8_gain: dict[str, float]) -> tuple[float, bool | None]:
    """Formula over published step time, and whether a run with FSDP is said to fit."""
    require(row.status == "ok", "failed")
    require(row.workload in ("pretrain", "sft", "lora"), "not training")
    require("memory" not in str(row.source_check), "from memory")
    require(row.experts != row.experts, "mixture of experts")
    for each in ("pp", "cp", "ep"):
        require(number(row[each]) == 1, f"{each} > 1")
    require(all(row[name] == row[name] for name in _SIZES), "sizes not given")
    dtype = str(row["dtype"]).lower()
    is_fp8 = "fp8" in dtype
    require(is_fp8 or any(each in dtype for each in ("bf16", "fp16")), "other precision")
    name = machine_of(str(row.hardware))
    require(not is_fp8 or name in fp8_gain, "no measured fp8 rate")
    count, tensor, seq = int(row.n_devices), number(row.tp), int(row.seq_len_tokens)
    require(count % tensor == 0, "tp does not divide")
    data = count // tensor
    micro = number(row.micro_batch_seqs)
    items = row.global_batch_seqs / (data * micro)
    require(items >= 1, "batch smaller than ranks")
    config = config_of(row)
    step_s = published_step_s(row, config)
    sharding = str(row.zero_or_fsdp)
    shard = data if "FSDP" in sharding else 1
    if "group" in sharding:
        shard = min(data, int(sharding.rsplit(" ", 1)[-1]))
    lora = LoraSpec(rank=LORA_RANK, alpha=32.0) if row.workload == "lora" else None
    recompute = "full" if str(row.recompute).startswith("full") else "none"
    work = Workload(
        tokens=items * micro * seq, counted=items * micro * seq, num_items=items,
        row_tokens=micro * seq, row_counted=micro * seq, longest_row=micro * seq,
        document_tokens=seq, tensor_degree=tensor,
        num_trained=1, lora_rank=LORA_RANK if lora else 0, lora_alpha=32.0,
        lora_targets=lora.targets if lora else (),
    )  # fmt: skip
    specs = [build("data", {"name": "replicate"})]
    if shard > 1:
        specs.insert(0, build("data", {"name": "fsdp"}))
    if tensor > 1:
        specs.append(build("tensor", {"name": "megatron"}))
    mesh = Mesh(replicate=data // shard, shard=shard, tp=tensor)
    local = local_config(config, tensor)
    units = units_of(local, work, specs[:-1] if tensor > 1 else specs, mesh, 4)
    rates = device_rates(read_machine(name), fp8_gain[name] if is_fp8 else 1.0)
    assert isinstance(rates, DeviceRates)
    groups = operator_groups(local, work)
    formula = step_seconds(
        config, work, groups, units, specs, rates, mesh=mesh, recompute=recompute
    )
    require(formula.total_s <= step_s, "faster than the roofline")
    fits = None
    if shard > 1:
        always = build("data", {"name": "fsdp", "reduce_every_item": True})
        kept = units_of(local, work, [always], mesh, 4)
        peak_bytes = sum(memory_terms(local, work, kept, recompute=recompute).values())
        fits = peak_bytes <= read_machine(name).usable_bytes
    return formula.total_s / step_s, fits


def class_of(row: pd.Series) -> str:
    """What a row is evidence for."""
    if "tpu" in str(row.hardware).lower():
        return "tpu"
    return "adapters" if row.workload == "lora" else "full"


def quantile(values: list[float], weights: list[float], share: float) -> float:
    """Weighted quantile."""
    order = np.argsort(values)
    ends = np.cumsum(np.asarray(weights)[order])
    at = int(np.searchsorted(ends, share * ends[-1]))
    return float(np.asarray(values)[order][min(at, len(order) - 1)])


def main(training: str, accelerators: str, out: str) -> None:
    """Read, price, write."""
    table = pd.read_csv(accelerators).set_index("name")
    fp8_gain = {
        name: table.loc[full].measured_max_fp8_tflops / read_machine(name).matmul.value * 1e12
        for name, full in IN_ACCELERATORS.items()
    }
    fp8_gain = {name: gain for name, gain in fp8_gain.items() if gain == gain}
    unused: Counter[str] = Counter()
    memory: dict[str, Counter[str]] = defaultdict(Counter)
    found: dict[str, dict[str, list[float]]] = defaultdict(lambda: defaultdict(list))
    for _, row in pd.read_csv(training, low_memory=False).iterrows():
        try:
            value, fits = compared(row, fp8_gain)
        except Unused as reason:
            unused[str(reason)] += 1
        except (PhalanxError, ValueError) as error:
            unused[f"{type(error).__name__}: no such plan"] += 1
        else:
            found[class_of(row)][row.source_id].append(value)
            if fits is not None:
                memory[row.source_id]["ran"] += 1
                memory[row.source_id]["said to fit"] += fits
    classes = {}
    for name, sources in sorted(found.items()):
        values = [each for rows in sources.values() for each in rows]
        weights = [1.0 / len(rows) for rows in sources.values() for _ in rows]
        medians = {source: round(float(np.median(rows)), 3) for source, rows in sources.items()}
        classes[name] = {
            "median": round(float(np.median(list(medians.values()))), 3),
            "p10": round(quantile(values, weights, 0.1), 3),
            "p90": round(quantile(values, weights, 0.9), 3),
            "num_rows": len(values),
            "medians_of_sources": medians,
            "rows_of_sources": {source: len(rows) for source, rows in sources.items()},
        }
    document = {
        "what": "formula / published step time; see benchmarks/cluster_efficiency.py",
        "table": Path(training).name,
        "classes": classes,
        "fsdp_runs": {source: dict(counts) for source, counts in memory.items()},
        "rows_not_used": dict(unused.most_common()),
    }
    Path(out).write_text(json.dumps(document, indent=1) + "\n")
    print(json.dumps(document, indent=1))


if __name__ == "__main__":
    main(*sys.argv[1:])

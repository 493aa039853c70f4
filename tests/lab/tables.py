"""Small tables of measurements for tests."""

from __future__ import annotations

import csv
import io

# 16 rows a step on 8 devices: a llama-like model whose sizes the row prints.
LLAMA_ROW = {
    "source_id": "somebody",
    "source_date": "2025-09",
    "source_check": "read from the source",
    "workload": "pretrain",
    "status": "ok",
    "model": "a model of its own",
    "params_b": "8.03",
    "layers": "32",
    "hidden": "4096",
    "heads": "32",
    "kv_heads": "8",
    "ffn": "14336",
    "vocab": "128256",
    "hardware": "NVIDIA H100 SXM 80GB",
    "n_devices": "8",
    "devices_per_node": "8",
    "interconnect": "",
    "dtype": "BF16",
    "framework": "Megatron-LM",
    "tp": "2",
    "pp": "1",
    "vpp": "",
    "dp": "",
    "cp": "",
    "ep": "",
    "zero_or_fsdp": "",
    "micro_batch_seqs": "1",
    "global_batch_seqs": "16",
    "seq_len_tokens": "8192",
    "recompute": "",
    "schedule": "",
    "experts": "",
    "topk": "",
    "tokens_per_s_per_device": "",
    "step_time_s": "2.0",
    "tflops_per_device": "",
    "memory_gb": "",
    "memory_kind": "",
    "notes": "",
}


def row(**cells: str) -> dict[str, str]:
    """The row with other cells."""
    return LLAMA_ROW | cells


def text(*rows: dict[str, str]) -> str:
    """As CSV."""
    out = io.StringIO()
    writer = csv.DictWriter(out, rows[0].keys(), lineterminator="\n")
    writer.writeheader()
    writer.writerows(rows)
    return out.getvalue()

"""What a published serving row calls its engine, its numbers and its load."""

from __future__ import annotations

import re

from phalanx.lab.csv_rows import CsvRow
from phalanx.lab.row_dtype import first_named, plain_dtype

_FAMILIES = (
    ("vllm-ascend", "vllm-ascend"),
    ("vllm tpu", "vllm-tpu"),
    ("vllm (rocm)", "vllm-rocm"),
    ("llmboost", "llmboost"),
    ("vllm", "vllm"),
    ("sglang", "sglang"),
    ("tensorrt", "trtllm"),
    ("neuronx", "neuronx"),
    ("fastertransformer", "fastertransformer"),
)
_PRECISIONS = (  # in this order: the first that the text names
    ("weights int8", "int8"),
    ("mxfp4", "mxfp4"),
    ("fp4", "fp4"),
    ("int4", "int4"),
    ("int8", "int8"),
    ("fp8", "fp8"),
    ("bf16", "bf16"),
    ("fp16", "fp16"),
)
# what a model's published checkpoint is stored in where the row does not say; gpt-oss was published
# in MXFP4 alone, so that other formats that its rows name are those of the products
_CHECKPOINTS = (
    ("nvfp4", "fp4"),
    ("fp4", "fp4"),
    ("fp8", "fp8"),
    ("gpt-oss", "mxfp4"),
    ("kimi-k2.5", "int4"),
    ("kimi-k2-thinking", "int4"),
    ("deepseek-r1", "fp8"),
    ("deepseek-v3", "fp8"),
)


def software_of(row: CsvRow) -> str:
    """ "family:generation"; of engines that give no version, the half year of the run."""
    text = row.words("engine")
    family = next((name for word, name in _FAMILIES if word in text), text.split(" ")[0])
    return f"{family}:{_generation(family, row)}"


def _generation(family: str, row: CsvRow) -> str:
    found = re.search(r"(\d+)\.(\d+)(?:\.(\d+))?", row.get("engine_version"))
    if found:
        # SGLang has stayed at 0.5 for a year: its third number is the generation
        parts = found.groups() if family == "sglang" else found.groups()[:2]
        return ".".join(part for part in parts if part)
    date = re.match(r"(\d{4})-(\d{2})", row.get("source_date"))
    return f"{date[1]}h{1 + (int(date[2]) > 6)}" if date else ""


def precision_of(row: CsvRow) -> str:
    """Of the weights, a key of `WEIGHT_BYTES`; the checkpoint's where the row does not say.

    Empty where the row names a format that is not known.
    """
    model, text = row.words("model"), plain_dtype(row.get("dtype"))
    if "gpt-oss" in model:
        return "mxfp4"
    return first_named(text, _PRECISIONS) if text else first_named(model, _CHECKPOINTS) or "bf16"


def load_of(row: CsvRow, kind: str) -> str:
    """Who made the load: generators differ in how they start and in how many requests they send.

    The public InferenceX runs (ten waves of requests) and a vendor's own sweeps are told apart by
    the words of the source; other loads are as their kind.
    """
    if "inferencex" in row.words("source"):
        return "inferencex"
    return "vendor sweep" if "in-house sweep" in row.words("source") else kind

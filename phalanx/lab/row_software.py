"""Which software a published row ran, its generation and precision, and what that implies."""

from __future__ import annotations

import re
from dataclasses import dataclass
from functools import cache

from phalanx.lab.csv_rows import CsvRow
from phalanx.lab.row_dtype import first_named, plain_dtype


@dataclass(frozen=True, slots=True)
class Family:
    """What a framework does unasked.

    Attributes:
        pattern: of its name in tables.
        name: in the efficiency tables.
        zero: what it shards where a row does not say.
        sequence_parallel: with tensor parallelism.
        recomputes: whole layers, where a plan would not fit otherwise; others offload or print it.
        spreads_experts: over its data ranks.
        interleaves: pipelines of dense models.
    """

    pattern: str
    name: str
    zero: int
    sequence_parallel: bool
    recomputes: bool = False
    spreads_experts: bool = False
    interleaves: bool = False


_FAMILIES = (
    Family(r"megatron.*deepspeed|deepspeed.*megatron|gpt-neox", "megatron-deepspeed", 0, False),
    Family(r"accelerate|\btrl\b|axolotl|hugging ?face|^transformers", "transformers", 0, False),
    Family(r"deepspeed", "torch", 3, False),
    Family(r"nanotron", "nanotron", 0, True),
    Family(r"maxtext|jax|t5x|pathways", "maxtext", 3, False),
    Family(r"automodel", "automodel", 3, True, recomputes=True, spreads_experts=True),
    Family(r"composer|foundry", "composer", 3, True),
    Family(r"torchtitan|fsdp", "torch", 3, True),
    Family(r"neuron", "neuron", 1, True),
    Family(r"llmboost|rocm|primus", "primus", 1, True, recomputes=True),
    Family(
        *(r"megatron|nemo|megascale|nvidia|ngc|mxnet|hai-llm", "megatron", 1, True),
        interleaves=True,
    ),
    Family(r"pytorch|torch", "torch", 3, True),
)
_OTHER = Family("", "other", 0, True)
_BEFORE_SEQUENCE_PARALLELISM = 22.05  # Korthikanti et al., whose code also brought ZeRO 1 to it

# the first that a text names; matrix products in int8 run at the rate of fp8
_PRECISIONS = (
    *(("fp4", "fp4"), ("fp8", "fp8"), ("int8", "fp8")),
    *(("bf16", "bf16"), ("fp16", "fp16")),
)


def software_of(row: CsvRow) -> str:
    """ "family:generation" as efficiency tables name it; the generation is YY.MM, or a version.

    A release that is more than a year older than its row is a line left over from an earlier one:
    the row's date counts.
    """
    return f"{family_of(row).name}:{_generation(row.get('framework'), row.get('source_date'))}"


@cache
def _generation(framework: str, date: str) -> str:
    release = r"(?:release|pytorch|nemo|ngc|torch)\s+v?(\d+\.\d+)"
    named, published = re.search(release, framework, re.IGNORECASE), _year_and_month(date)
    if named is None:
        return published
    is_month = re.fullmatch(r"\d\d\.\d\d", named[1])
    if is_month and published and float(published) - float(named[1]) > 1.0:
        return published
    return named[1]


def precision_of(row: CsvRow) -> str:
    """Of matrix products; empty where the row does not say, or names none that is known."""
    return first_named(plain_dtype(row.get("dtype")), _PRECISIONS)


def family_of(row: CsvRow) -> Family:
    """Of the row's framework; one that does nothing unasked for a framework that is not known.

    What MLPerf's submitters on NVIDIA's devices call "PyTorch" or "CUDA" is NVIDIA's own code.
    """
    family = _family(row.get("framework"))
    is_mlperf = "mlperf" in f"{row.words('source_id')} {row.words('source')}"
    is_submission = is_mlperf and "nvidia" in row.words("hardware")
    return _family("megatron") if is_submission and family.name in ("torch", "other") else family


@cache
def _family(framework: str) -> Family:
    text = framework.lower()
    return next((each for each in _FAMILIES if re.search(each.pattern, text)), _OTHER)


def _year_and_month(text: str) -> str:
    match = re.search(r"(?:20)?(\d\d)[.\-](0[1-9]|1[0-2])(?!\d)", text)
    if match:
        return f"{match[1]}.{match[2]}"
    match = re.search(r"20(\d\d)", text)
    return f"{match[1]}.01" if match else ""


def is_before_sequence_parallelism(software: str) -> bool:
    """Whether it is a Megatron that neither splits sequences nor shards the optimizer yet."""
    family, generation = software.split(":")
    digits = re.fullmatch(r"\d\d\.\d\d", generation)
    return (
        family == "megatron" and bool(digits) and float(generation) < _BEFORE_SEQUENCE_PARALLELISM
    )

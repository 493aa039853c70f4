"""A `vllm serve` line, or the options of vLLM's OpenAI server.

Devices = data * pipeline * tensor (* prefill context). With expert parallelism, experts are spread
over data * tensor ranks.
"""

from __future__ import annotations

from typing import Any

from phalanx.planner.importers.entries import Document
from phalanx.planner.importers.foreign import NOT_MODELLED, ForeignPlan
from phalanx.planner.importers.reading import Reading

SHORT = {
    "tp": "tensor-parallel-size",
    "pp": "pipeline-parallel-size",
    "dp": "data-parallel-size",
    "dcp": "decode-context-parallel-size",
    "pcp": "prefill-context-parallel-size",
    "ep": "enable-expert-parallel",
    "q": "quantization",
    "n": "nnodes",
    "r": "node-rank",
    "dpl": "data-parallel-size-local",
    "cc": "compilation-config",
    "O": "optimization-level",
}
_NOT_MODELLED = {
    "compilation-config": "priced as compiled, with graphs",
    "optimization-level": "priced as compiled, with graphs",
    "enforce-eager": "launch times of a server without graphs are not priced",
    "speculative-config": "speculative tokens are not priced",
    "enable-lora": "adapters of requests are not priced",
    "max-loras": "adapters of requests are not priced",
    "max-lora-rank": "adapters of requests are not priced",
    "cpu-offload-gb": "weights in host memory are not priced",
    "kv-offloading-size": "cached tokens in host memory are not priced",
    "kv-transfer-config": "prefill and decode on separate servers are not read from here",
    "enable-dbo": "overlap of half batches is not priced",
    "enable-eplb": "experts are priced with the imbalance that is given",
    "all2all-backend": "all-to-alls are priced as those of NCCL",
    "decode-context-parallel-size": "a cache spread over tensor ranks is not priced",
    "prefill-context-parallel-size": "prompts spread over ranks are not priced",
    "kv-cache-memory-bytes": "the cache is priced by gpu-memory-utilization",
    "num-gpu-blocks-override": "the cache is priced by gpu-memory-utilization",
    "async-scheduling": "host time between steps is part of the fitted efficiency",
    "limit-mm-per-prompt": "images and sound are not priced",
    "hf-overrides": "sizes are those of the model as published",
    "scheduling-policy": "requests are priced in order of arrival",
    "load-format": "weights are priced as they are published",
}
# bits of a cached element, by a part of the type's name
_KV = {"float16": 16, "bfloat16": 16, "fp8": 8, "int8": 8, "nvfp4": 4, "int4": 4}
_DTYPES = {"auto": None, "half": "fp16", "float16": "fp16", "bfloat16": "bf16"}
_DTYPES |= {"float": "fp32", "float32": "fp32"}
# weight bits, precision of products, by a part of the method's name
_QUANTISED = {
    **{"nvfp4": (4, "fp4"), "modelopt_fp4": (4, "fp4"), "mxfp4": (4, "bf16")},
    **{"fp8": (8, "fp8"), "int8": (8, "bf16"), "mxfp8": (8, "fp8")},
    **{"awq": (4, "bf16"), "gptq": (4, "bf16"), "bitsandbytes": (4, "bf16"), "int4": (4, "bf16")},
}


def read(document: Document, model: str = "") -> ForeignPlan:
    """The plan of a server.

    Args:
        model: that stands behind `serve`, rather than as --model.

    Raises:
        JobError: `foreign/value` with the line.
    """
    reading = Reading("vllm", document, _NOT_MODELLED)
    if model:
        reading.set("model", model, "vllm serve")
    else:
        reading.text("model", "model")
    reading.use("model", "served-model-name", "host", "port", "api-key", "trust-remote-code")
    _mesh(reading)
    _limits(reading)
    _precision(reading)
    return reading.finish(role="serve")


def _mesh(reading: Reading) -> None:
    tensor = reading.whole("tensor-parallel-size", "tensor", default=1)
    pipeline = reading.whole("pipeline-parallel-size", "pipeline", default=1)
    data = reading.whole("data-parallel-size", "replicate", default=1)
    reading.use("data-parallel-size-local", "nnodes", "node-rank", "distributed-executor-backend")
    where = reading.where("tensor-parallel-size")
    reading.set("devices", tensor * pipeline * data, f"{where}, times pipeline and data")
    spreads = reading.flag("enable-expert-parallel", default=False)
    expert = tensor * data if spreads else 1
    reading.set("expert", expert, reading.where("enable-expert-parallel"))
    if not spreads:
        reading.set("expert_tensor", tensor, "experts are cut over tensor ranks")


def _limits(reading: Reading) -> None:
    key = "max-model-len"
    value = reading.raw(key)
    if value is not None and str(value).lower() not in ("auto", "-1"):
        reading.set("max_tokens", _whole(reading, key, value), reading.where(key))
    key = "max-num-batched-tokens"
    value = reading.raw(key)
    if value is not None:
        reading.set("max_step_tokens", _whole(reading, key, value), reading.where(key))
    reading.whole("max-num-seqs", "max_running")
    frac = reading.number("gpu-memory-utilization", "memory_frac", default=0.92)
    if not 0 < frac <= 1:
        raise reading.error("gpu-memory-utilization", "must be above 0, at most 1", [0.92])
    for name, field in (
        ("enable-prefix-caching", "caches_prefixes"),
        ("enable-chunked-prefill", "chunks_prefill"),
    ):
        off = f"no-{name}"
        if reading.flag(off, default=False):
            reading.set(field, False, reading.where(off))
        else:
            reading.flag(name, field, default=True)


def _whole(reading: Reading, key: str, value: Any) -> int:
    """A whole number as vLLM reads it: 1k is 1,000, 1K is 1,024."""
    text = str(value)
    factor = {"k": 10**3, "m": 10**6, "g": 10**9, "K": 2**10, "M": 2**20, "G": 2**30}
    scale = factor.get(text[-1:], 1)
    digits = text[:-1] if scale > 1 else text
    try:
        number = float(digits) * scale if len(digits) < 24 else 0.0
    except ValueError:
        number = 0.0
    if not 1 <= number <= 2**53 or number != int(number):
        raise reading.error(key, "must be a whole number of at least 1, or one such as 32k")
    return int(number)


def _precision(reading: Reading) -> None:
    stored = reading.word("dtype", _DTYPES)
    if stored:
        reading.set("precision", stored, reading.where("dtype"))
    named = reading.text("quantization")
    if named and named.lower() not in ("none", "auto"):
        found = [each for part, each in _QUANTISED.items() if part in named.lower()]
        if found:
            reading.set("weight_bits", found[0][0], reading.where("quantization"))
            reading.set("precision", found[0][1], reading.where("quantization"))
        else:
            reading.note("quantization", NOT_MODELLED, "a method whose weights' size is not known")
    elif not named:
        reading.assume("quantization", "weights as the model's folder has them")
    kept = reading.text("kv-cache-dtype", default="auto")
    if kept != "auto":
        sizes = [bits for part, bits in _KV.items() if part in str(kept).lower()]
        if sizes:
            reading.set("kv_bits", min(sizes), reading.where("kv-cache-dtype"))
        else:
            reading.note("kv-cache-dtype", NOT_MODELLED, "a type whose size is not known")

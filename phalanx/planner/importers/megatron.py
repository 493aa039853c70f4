"""Megatron-LM's arguments: a launch script, or the list alone.

Data ranks = devices / (tensor * pipeline * context); a step is `global-batch-size` rows, of which a
data rank computes `micro-batch-size` at a time. The distributed optimizer is ZeRO 1 over data and
context ranks.
"""

from __future__ import annotations

from typing import Any

from phalanx.planner.importers.entries import Document
from phalanx.planner.importers.foreign import ALL_LEFT, NOT_MODELLED, ForeignPlan
from phalanx.planner.importers.reading import Reading

_NOT_MODELLED = {
    "overlap-grad-reduce": "overlap is part of the fitted efficiency of the software",
    "overlap-param-gather": "overlap is part of the fitted efficiency of the software",
    "tp-comm-overlap": "overlap is part of the fitted efficiency of the software",
    "no-overlap-p2p-communication": "overlap is part of the fitted efficiency of the software",
    "rampup-batch-size": "priced at the final batch",
    "step-batch-size-schedule": "priced at the final batch",
    "mtp-num-layers": "heads that predict further tokens are not priced",
    "decoder-first-pipeline-num-layers": "stages are priced as equal shares of the layers",
    "decoder-last-pipeline-num-layers": "stages are priced as equal shares of the layers",
    "pipeline-model-parallel-layout": "stages are priced as equal shares of the layers",
    "recompute-modules": "priced as selective recomputation of the attention core",
    "recompute-num-layers": "priced as recomputation of all layers",
    "recompute-method": "priced as recomputation of all layers",
    "fine-grained-activation-offloading": "activations in host memory",
    "cpu-offloading-num-layers": "activations in host memory",
    "moe-expert-capacity-factor": "no token is dropped in the price",
    "moe-layer-recompute": "priced by recompute-granularity",
    "hierarchical-context-parallel-sizes": "priced as one ring",
    "hybrid-context-parallel": "priced as one ring",
    "cuda-graph-impl": "launch times are part of the fitted efficiency of the software",
    "enable-cuda-graph": "launch times are part of the fitted efficiency of the software",
    "no-gradient-accumulation-fusion": "priced as fused",
    "multi-latent-attention": "sizes of latent attention are not read: name the model",
    "hybrid-layer-pattern": "sizes of hybrid models are not read: name the model",
    "window-size": "attention is priced as the model's own",
    "use-torch-fsdp2": "priced as Megatron's own sharding of weights",
    "accumulate-allreduce-grads-in-fp32": "gradients are priced in float32",
    "grad-reduce-in-bf16": "gradients are priced in float32",
}
_CONTEXT = {"p2p": "ring", "a2a": "ulysses", "all_gather": "all-gather", "a2a+p2p": "ring"}
_SHARDED = {"no_shard": 0, "optim": 1, "optim_grads": 2, "optim_grads_params": 3}
# of torchrun, which takes either dash
_LAUNCH = tuple(
    name.replace("_", dash)
    for name in (
        *("nproc_per_node", "nnodes", "node_rank", "master_addr", "master_port", "log_dir"),
        *("rdzv_endpoint", "rdzv_backend", "rdzv_id", "tee", "redirects", "max_restarts"),
    )
    for dash in "_-"
)


def read(document: Document) -> ForeignPlan:
    """The plan of a list of Megatron arguments.

    Raises:
        JobError: `foreign/value` with the line.
    """
    reading = Reading("megatron", document, _NOT_MODELLED)
    _devices(reading)
    _sizes(reading)
    _mesh(reading)
    _batch(reading)
    _memory(reading)
    return reading.finish()


def _devices(reading: Reading) -> None:
    """Of `torchrun`, where both numbers are in the script."""
    found = []
    for names in (("nproc_per_node", "nproc-per-node"), ("nnodes",)):
        key = next((name for name in names if name in reading.document.entries), names[0])
        value = reading.raw(key)
        found.append(int(value) if str(value).isdecimal() and len(str(value)) < 9 else 0)
    if all(found):
        where = f"{reading.where('nnodes')}, processes of a node"
        reading.set("devices", found[0] * found[1], where)
    reading.use(*_LAUNCH)


def _sizes(reading: Reading) -> None:
    """`config.json` keys of the decoder; a name only where the tokenizer's model gives it."""
    sizes: dict[str, Any] = {}
    for key, name in (
        ("num-layers", "num_hidden_layers"),
        ("hidden-size", "hidden_size"),
        ("ffn-hidden-size", "intermediate_size"),
        ("num-attention-heads", "num_attention_heads"),
        ("kv-channels", "head_dim"),
        ("padded-vocab-size", "vocab_size"),
        ("vocab-size", "vocab_size"),
        ("max-position-embeddings", "max_position_embeddings"),
        ("num-experts", "num_experts"),
        ("moe-ffn-hidden-size", "moe_intermediate_size"),
        ("moe-router-topk", "num_experts_per_tok"),
        ("moe-shared-expert-intermediate-size", "shared_expert_intermediate_size"),
    ):
        value = reading.whole(key)
        if value:
            sizes.setdefault(name, value)
    groups = reading.whole("num-query-groups", default=1)
    if reading.flag("group-query-attention", default=False):
        sizes["num_key_value_heads"] = groups
    sizes["tie_word_embeddings"] = not reading.flag(
        "untie-embeddings-and-output-weights", default=False
    )
    gated = reading.flag("swiglu", default=False)
    sizes["hidden_act"] = "silu" if gated else "gelu"
    hidden = sizes.get("hidden_size")
    if hidden and "intermediate_size" not in sizes:
        sizes["intermediate_size"] = int(hidden * 8 / 3 / 64) * 64 if gated else 4 * hidden
    if "num_hidden_layers" in sizes and hidden:
        reading.set("sizes", sizes, f"{reading.where('num-layers')} and others")
    tokenizer = reading.text("tokenizer-model")
    if tokenizer and "/" in tokenizer and not tokenizer.endswith((".model", ".json")):
        reading.set("model", tokenizer, f"{reading.where('tokenizer-model')}, by its tokenizer")
    if "vocab_size" not in sizes and not reading.get("model"):
        reading.assume("vocab-size", "the vocabulary is not stated: name the model")
    paths = reading.names("data-path") or reading.names("train-data-path")
    if paths:
        reading.set("data", paths[0], reading.where("data-path"))
    reading.use("data-path", "train-data-path", "tokenizer-type", "position-embedding-type")
    reading.use("normalization", "disable-bias-linear")


def _mesh(reading: Reading) -> None:
    reading.whole("tensor-model-parallel-size", "tensor", default=1)
    reading.whole("pipeline-model-parallel-size", "pipeline", default=1)
    reading.whole("context-parallel-size", "context", default=1)
    kinds = reading.names("cp-comm-type", default=("p2p",))
    known = _CONTEXT.get(str(kinds[0]))
    if known is None:
        raise reading.error("cp-comm-type", "no such choice", list(_CONTEXT))
    reading.set("context_kind", known, reading.where("cp-comm-type"))
    reading.whole("expert-model-parallel-size", "expert", default=1)
    tensor = reading.get("tensor")
    reading.whole("expert-tensor-parallel-size", "expert_tensor", default=tensor)
    reading.flag("sequence-parallel", "sequence_parallel", default=False)
    key, zero = "use-distributed-optimizer", 0
    if reading.flag(key, default=False):
        zero = 1
    if reading.flag("use-megatron-fsdp", default=False):
        key = "data-parallel-sharding-strategy"
        zero = reading.word(key, _SHARDED, default=3)
    reading.use("data-parallel-sharding-strategy")
    reading.set("zero", zero, reading.where(key))
    reading.set("shard", ALL_LEFT if zero else 1, reading.where(key))
    instances = reading.whole("num-distributed-optimizer-instances", default=1)
    if zero and instances > 1:
        where = reading.where("num-distributed-optimizer-instances")
        reading.set("replicate", instances, where)
    _virtual(reading)


def _virtual(reading: Reading) -> None:
    chunks = reading.whole("num-virtual-stages-per-pipeline-rank", default=1)
    where = reading.where("num-virtual-stages-per-pipeline-rank")
    layers = reading.whole("num-layers-per-virtual-pipeline-stage")
    if layers:
        key = "num-layers-per-virtual-pipeline-stage"
        total = (reading.get("sizes") or {}).get("num_hidden_layers", 0)
        each, rest = divmod(total, layers * reading.get("pipeline"))
        if not each or rest:
            rule = (
                f"must divide the layers of a stage, which are {total} / {reading.get('pipeline')}"
            )
            raise reading.error(key, rule)
        chunks, where = each, reading.where(key)
    reading.set("virtual", chunks, where)
    reading.set("schedule", "interleaved" if chunks > 1 else "1f1b", where)


def _batch(reading: Reading) -> None:
    rows = reading.whole("micro-batch-size", "micro_rows")
    if rows is None:
        reading.assume("micro-batch-size", "is not stated; priced with 1 row")
        reading.set("micro_rows", 1, "assumed")
    if not reading.whole("global-batch-size", "step_rows"):
        reading.set("num_micro", 1, "default of megatron: one micro-batch to a data rank")
    reading.whole("seq-length", "row_tokens")
    samples = reading.whole("train-samples")
    rows = reading.get("step_rows")
    if not reading.whole("train-iters", "steps") and samples and rows:
        reading.set("steps", max(1, samples // rows), reading.where("train-samples"))
    reading.number("lr", "lr")
    is_tuning = reading.flag("sft", default=False)
    reading.set("method", "full" if is_tuning else "pretrain", reading.where("sft"))
    reading.set("packed", True, "megatron fills rows with the text of several documents")


def _memory(reading: Reading) -> None:
    words = {"full": "full", "selective": "selective"}
    again = reading.word("recompute-granularity", words, default="none")
    where = reading.where("recompute-granularity")
    if reading.flag("recompute-activations", default=False):
        again, where = "selective", reading.where("recompute-activations")
    reading.set("recompute", again, where)
    key = next((k for k in ("fp16", "bf16") if reading.flag(k, default=False)), "")
    precision = key or "fp32"
    for name in ("fp8-format", "fp4-format"):
        if reading.text(name):
            key, precision = name, name[:3]
    reading.use("fp16", "bf16", "fp8-recipe", "fp4-recipe")
    if not key:
        reading.assume("bf16", "neither --bf16 nor --fp16 is given: float32")
    reading.set("precision", precision, reading.where(key or "bf16"))
    reading.set("master_dtype", "float32", "megatron keeps float32 master weights")
    sizes = {"fp32": 4, "fp16": 2, "bf16": 2, "fp8": 1}
    moments = [reading.word(f"exp-avg{end}-dtype", sizes, default=4) for end in ("", "-sq")]
    where = reading.where("exp-avg-dtype")
    reading.set("moment_bytes", float(sum(moments)), where)
    frac = reading.number("optimizer-offload-fraction", default=1.0)
    if reading.flag("optimizer-cpu-offload", default=False):
        if frac > 1:
            raise reading.error("optimizer-offload-fraction", "must be 0 to 1", [1])
        reading.set("offload", frac, reading.where("optimizer-cpu-offload"))
    if str(reading.text("optimizer", default="adam")) != "adam":
        reading.note("optimizer", NOT_MODELLED, "moments are priced as those of Adam")

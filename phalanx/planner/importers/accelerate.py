"""accelerate's launch configuration (YAML or JSON, `accelerate config`).

It says how a model is spread, not which; distributed types FSDP, DEEPSPEED, MULTI_GPU, NO and
MEGATRON_LM. FSDP's five strategies are ZeRO stages: FULL_SHARD 3, SHARD_GRAD_OP 3 with weights kept
gathered between forward and backward, NO_SHARD 0, HYBRID_* the same within a machine.
"""

from __future__ import annotations

from phalanx.planner.importers.deepspeed import read_deepspeed
from phalanx.planner.importers.entries import Document
from phalanx.planner.importers.foreign import ALL_LEFT, NOT_MODELLED, ForeignPlan
from phalanx.planner.importers.reading import Reading

PRECISION = {"no": "fp32", "fp16": "fp16", "bf16": "bf16", "fp8": "fp8"}
_TYPES = {
    "NO": "none",
    "FSDP": "fsdp",
    "DEEPSPEED": "deepspeed",
    "MEGATRON_LM": "megatron",
    **dict.fromkeys(["MULTI_GPU", "MULTI_CPU", "MULTI_NPU", "MULTI_XPU", "MULTI_HPU"], "ddp"),
    **dict.fromkeys(["MULTI_MLU", "MULTI_MUSA", "MULTI_SDAA", "MULTI_NEURON", "XLA"], "ddp"),
}
# strategy -> (ZeRO stage, weights stay gathered, replicas across machines)
STRATEGIES = {
    "FULL_SHARD": (3, False, False),
    "SHARD_GRAD_OP": (3, True, False),
    "NO_SHARD": (0, False, False),
    "HYBRID_SHARD": (3, False, True),
    "HYBRID_SHARD_ZERO2": (3, True, True),
}
_NUMBERED = {str(at): value for at, value in enumerate(STRATEGIES.values(), 1)}
_NOT_MODELLED = {
    "dynamo_config": "torch.compile changes the speed of operators; prices are for compiled models",
    "dynamo_backend": "torch.compile changes the speed of operators",
    "fsdp_config.fsdp_activation_checkpointing_offload": "activations in host memory",
    "fsdp_config.activation_checkpointing_offload": "activations in host memory",
    "fsdp_config.fsdp_auto_wrap_policy": "priced with a unit to a layer",
    "fsdp_config.fsdp_min_num_params": "priced with a unit to a layer",
    "fsdp_config.fsdp_forward_prefetch": "priced as overlapping where the layers before allow it",
    "fsdp_config.fsdp_backward_prefetch": "priced as overlapping where the layers before allow it",
    "deepspeed_config.offload_param_nvme_path": "weights on disk are not priced",
    "deepspeed_config.offload_optimizer_nvme_path": "optimizer state on disk is not priced",
    "downcast_bf16": "only for TPUs",
}


def read(document: Document) -> ForeignPlan:
    """The plan of an accelerate configuration.

    Raises:
        JobError: `foreign/value` with the line.
    """
    reading = Reading("accelerate", document, _NOT_MODELLED)
    spread(reading)
    return reading.finish()


def spread(reading: Reading) -> None:
    """Devices, sharding, precision and offload."""
    if reading.flag("use_cpu"):
        reading.note("use_cpu", NOT_MODELLED, "training on processors is priced for accelerators")
    devices = reading.whole("num_processes", default=-1, low=-1)
    if devices > 0:
        reading.set("devices", devices, reading.where("num_processes"))
    machines = reading.whole("num_machines", default=1)
    reading.use("machine_rank", "gpu_ids", "compute_environment", "main_training_function")
    reading.word("mixed_precision", PRECISION, "precision", default="fp32")
    kind = reading.word("distributed_type", _TYPES, default="none")
    {"fsdp": _fsdp, "deepspeed": _deepspeed, "megatron": _megatron}.get(kind, _replicas)(reading)
    if kind == "fsdp" and reading.document.has("parallelism_config"):
        _axes(reading)
    elif reading.get("replicate") == ALL_LEFT:
        where = "one shard group to a machine"
        reading.set("replicate", machines, where)
        reading.set("shard", devices // machines if devices > 0 else ALL_LEFT, where)


def _replicas(reading: Reading) -> None:
    where = reading.where("distributed_type")
    reading.set("zero", 0, where)
    reading.set("shard", 1, where)


def _fsdp(reading: Reading) -> None:
    def key(name: str) -> str:
        """Keys stand with or without the prefix."""
        long = f"fsdp_config.fsdp_{name}"
        return long if long in reading.document.entries else f"fsdp_config.{name}"

    version = reading.whole(key("version"), default=1)
    place = key("sharding_strategy")
    default = STRATEGIES["FULL_SHARD"]
    if version >= 2:
        strategies = {"true": default, "false": STRATEGIES["SHARD_GRAD_OP"]} | STRATEGIES
        reading.use(place)
        place = key("reshard_after_forward")
    else:
        strategies = STRATEGIES | _NUMBERED
        reshard = key("reshard_after_forward")
        if place not in reading.document.entries and reshard in reading.document.entries:
            place = reshard
        reading.use(reshard)
    zero, kept, is_hybrid = reading.word(place, strategies, default=default)
    where = reading.where(place)
    reading.set("zero", zero, where)
    reading.set("shard", ALL_LEFT if zero else 1, where)
    reading.set("keeps_gathered", kept, where)
    if is_hybrid:
        reading.set("replicate", ALL_LEFT, where)
    place = key("activation_checkpointing")
    if reading.flag(place) is not None:
        again = "full" if reading.flag(place) else "none"
        reading.set("recompute", again, reading.where(place))
    if reading.flag(key("offload_params"), default=False):
        reading.set("offload", 1.0, reading.where(key("offload_params")))
        reading.set("offloads_weights", True, reading.where(key("offload_params")))


def _deepspeed(reading: Reading) -> None:
    at = "deepspeed_config."
    if reading.raw(f"{at}deepspeed_config_file"):  # the other keys are then in that file
        read_deepspeed(reading, f"{at}deepspeed_config_file")
        return
    stage = reading.whole(f"{at}zero_stage", "zero", default=2, low=0)
    if stage > 3:
        raise reading.error(f"{at}zero_stage", "must be 0 to 3", [3])
    reading.set("shard", ALL_LEFT if stage else 1, reading.where(f"{at}zero_stage"))
    reading.whole(f"{at}gradient_accumulation_steps", "num_micro")
    for name, field, value in (
        ("offload_optimizer_device", "offload", 1.0),
        ("offload_param_device", "offloads_weights", True),
    ):
        words = {"none": False, "cpu": True, "nvme": True}
        if reading.word(f"{at}{name}", words, default=False):
            reading.set(field, value, reading.where(f"{at}{name}"))


def _megatron(reading: Reading) -> None:
    at = "megatron_lm_config.megatron_lm_"
    reading.whole(f"{at}tp_degree", "tensor", default=1)
    reading.whole(f"{at}pp_degree", "pipeline", default=1)
    reading.whole(f"{at}num_micro_batches", "num_micro", default=1)
    reading.flag(f"{at}sequence_parallelism", "sequence_parallel", default=False)
    key = f"{at}use_distributed_optimizer"
    shards = reading.flag(key, default=False)
    reading.set("zero", int(shards), reading.where(key))
    reading.set("shard", ALL_LEFT if shards else 1, reading.where(key))
    if reading.flag(f"{at}recompute_activations"):
        reading.set("recompute", "selective", reading.where(f"{at}recompute_activations"))


def _axes(reading: Reading) -> None:
    """`parallelism_config`: every axis by its size; weights shard over dp_shard * cp ranks."""
    at = "parallelism_config.parallelism_config_"
    reading.whole(f"{at}tp_size", "tensor", default=1)
    context = reading.whole(f"{at}cp_size", default=1)
    ulysses = reading.whole(f"{at}sp_size", default=1)
    key = f"{at}sp_size" if ulysses > 1 else f"{at}cp_size"
    reading.set("context", context * ulysses, reading.where(key))
    words = {"allgather": "all-gather", "alltoall": "ring"}
    rotates = reading.word(f"{at}cp_comm_strategy", words, default="all-gather")
    kind = "ulysses" if ulysses > 1 else rotates
    reading.set("context_kind", kind, reading.where(key))
    reading.use(f"{at}cp_backend", f"{at}sp_backend", f"{at}sp_attn_implementation")
    reading.use(f"{at}sp_seq_length", f"{at}sp_seq_length_is_variable")
    reading.whole(f"{at}dp_replicate_size", "replicate", default=1)
    shard = reading.whole(f"{at}dp_shard_size", default=1)
    where = reading.where(f"{at}dp_shard_size")
    reading.set("shard", shard * context * ulysses, where)

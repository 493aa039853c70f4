"""axolotl's training configuration (YAML).

A device computes `micro_batch_size` rows of `sequence_len`, `gradient_accumulation_steps` times.
Devices = dp_replicate * dp_shard * context * tensor; what is not stated of them is the rest.
"""

from __future__ import annotations

from phalanx.planner.importers.accelerate import STRATEGIES
from phalanx.planner.importers.adapters import read_targets
from phalanx.planner.importers.deepspeed import read_deepspeed
from phalanx.planner.importers.entries import Document
from phalanx.planner.importers.foreign import ALL_LEFT, ASSUMED, NOT_MODELLED, ForeignPlan
from phalanx.planner.importers.reading import Reading

_NOT_MODELLED = {
    "rl": "priced as supervised training: rollouts and rewards are not part of it",
    "trl": "priced as supervised training: rollouts and rewards are not part of it",
    "torch_compile": "torch.compile changes the speed of operators",
    "activation_offloading": "activations in host memory",
    "selective_checkpointing": "what is kept by operator is priced as selective recomputation",
    **dict.fromkeys(
        (f"liger_{name}" for name in ("rope", "rms_norm", "layer_norm", "glu_activation")),
        "fused kernels keep fewer activations",
    ),
    "liger_fused_linear_cross_entropy": "a fused loss keeps no logits",
    "cut_cross_entropy": "a fused loss keeps no logits",
    "plugins": "what plug-ins change is not known here",
    "unfrozen_parameters": "priced as if all weights were trained",
    "lora_modules_to_save": "modules that are trained whole besides the adapters",
    "peft_use_dora": "magnitudes of weights are trained besides the adapters",
    "peft_layers_to_transform": "priced with adapters on all layers",
    "relora": "restarts of adapters are not priced",
    "lisa_step_interval": "layers that are frozen by turns are priced as trained",
    "val_set_size": "evaluation is not part of the price",
    "test_datasets": "evaluation is not part of the price",
    "auto_find_batch_size": "the batch that is found is not known before",
    "quantize_moe_experts": "experts are priced in the precision of the others",
    "tiled_mlp": "feed-forward blocks in tiles keep fewer activations",
    "flex_attention": "attention is priced as the fused kind",
    "eager_attention": "attention is priced as the fused kind",
    "fsdp_config.cpu_offload_pin_memory": "host memory is priced as pinned",
}
_EIGHT_BIT = ("8bit", "4bit")


def read(document: Document) -> ForeignPlan:
    """The plan of an axolotl configuration.

    Raises:
        JobError: `foreign/value` with the line.
    """
    reading = Reading("axolotl", document, _NOT_MODELLED)
    reading.text("base_model", "model")
    _data(reading)
    _method(reading)
    _batch(reading)
    _precision(reading)
    _mesh(reading)
    return reading.finish()


def _data(reading: Reading) -> None:
    for table in ("datasets", "pretraining_dataset"):
        keys = [key for key in reading.document.entries if _is_in(key, table)]
        paths = [key for key in keys if key.endswith(".path") or key == table]
        if paths:
            reading.text(paths[0], "data")
        if len(paths) > 1:
            text = f"{len(paths)} data sets are mixed; the lengths of the first stand for all"
            reading.note(paths[1], ASSUMED, text)
        reading.use(*keys)


def _is_in(key: str, table: str) -> bool:
    return key == table or key.startswith(f"{table}.")


def _method(reading: Reading) -> None:
    adapter = reading.text("adapter")
    words = {"lora": 16, "qlora": 4, "dora": 16}
    method = "lora" if adapter else "full"
    if reading.document.has("pretraining_dataset"):
        method = "pretrain"
    reading.set("method", method, reading.where("adapter"))
    in_four, in_eight = reading.flag("load_in_4bit"), reading.flag("load_in_8bit")
    if adapter:
        bits = reading.word("adapter", words)
        reading.whole("lora_r", "lora_rank", default=None)
        reading.number("lora_alpha", "lora_alpha")
        reading.number("lora_dropout", "lora_dropout")
        linear = reading.flag("lora_target_linear")
        if not linear:
            read_targets(reading)
        packed = reading.flag("gptq", default=False)
        bits = 4 if in_four or packed else 8 if in_eight else bits
        if bits < 16:
            key = "load_in_4bit" if in_four else "gptq" if packed else "adapter"
            reading.set("base_bits", bits, reading.where(key))
        if not reading.get("lora_rank"):
            raise reading.error("adapter", "needs lora_r", [16])
    reading.use("lora_r", "lora_alpha", "lora_dropout", "lora_target_linear")
    reading.use("lora_target_modules", "lora_target_parameters")
    steps = reading.whole("max_steps", "steps")
    epochs = reading.number("num_epochs", default=1.0)
    if not steps:
        reading.set("epochs", epochs, reading.where("num_epochs"))
    reading.number("learning_rate", "lr")


def _batch(reading: Reading) -> None:
    micro = reading.whole("micro_batch_size", "micro_rows", default=1)
    whole = reading.whole("batch_size")
    if whole:
        if whole % micro:
            raise reading.error("batch_size", f"must be a multiple of micro_batch_size, {micro}")
        reading.set("num_micro", whole // micro, reading.where("batch_size"))
    else:
        reading.whole("gradient_accumulation_steps", "num_micro", default=1)
    reading.use("gradient_accumulation_steps", "eval_batch_size", "pad_to_sequence_len")
    reading.whole("sequence_len", "row_tokens", default=512)
    if not reading.flag("sample_packing", "packed", default=False) and micro > 1:
        text = "rows of a batch are padded to the longest; priced as rows of sequence_len"
        reading.assume("sample_packing", text)
    words = {"true": "full", "false": "none", "offload": "full", "offload_disk": "full"}
    reading.word("gradient_checkpointing", words, "recompute", default="none")
    if str(reading.raw("gradient_checkpointing")).startswith("offload"):
        reading.note("gradient_checkpointing", NOT_MODELLED, "kept inputs live in host memory")
    if reading.flag("selective_checkpointing") and reading.get("recompute") == "full":
        reading.set("recompute", "selective", reading.where("selective_checkpointing"))


def _precision(reading: Reading) -> None:
    def is_on(key: str, default: bool = False) -> bool:
        words = {"true": True, "false": False, "auto": True, "full": True}
        return bool(reading.word(key, words, default=default))

    fp8, fp16, half = is_on("fp8"), is_on("fp16"), is_on("bfloat16")
    chosen = next((key for key, on in (("fp8", fp8), ("fp16", fp16)) if on), "bf16")
    brain = is_on("bf16", default=not (fp16 or half or is_on("float16") or is_on("float32")))
    name = chosen if chosen != "bf16" else "bf16" if brain or half else "fp32"
    reading.set("precision", name, reading.where("bfloat16" if half and not brain else chosen))
    master = "bfloat16" if half else "float32"
    reading.set("master_dtype", master, reading.where("bfloat16"))
    optimizer = str(reading.text("optimizer", default="adamw_torch_fused"))
    size = 2.0 if any(word in optimizer for word in _EIGHT_BIT) else 4.0 if half else 8.0
    reading.set("moment_bytes", size, reading.where("optimizer"))


def _mesh(reading: Reading) -> None:
    reading.whole("tensor_parallel_size", "tensor", default=1)
    old = reading.whole("sequence_parallel_degree", default=1)
    context = reading.whole("context_parallel_size", default=old)
    reading.set("context", context, reading.where("context_parallel_size"))
    reading.use("heads_k_stride", "ring_attn_func")
    reading.set("context_kind", "ring", "axolotl passes keys and values around a ring")
    reading.whole("expert_parallel_size", "expert", default=1)
    reading.whole("dp_replicate_size", "replicate", default=1)
    shard = reading.whole("dp_shard_size")
    sharded = reading.document.has("fsdp_config", "fsdp", "dp_shard_size", "fsdp_version")
    if reading.document.has("deepspeed"):
        read_deepspeed(reading, "deepspeed")
        return
    key = "dp_shard_size" if shard else "fsdp_config" if sharded else "dp_shard_size"
    where = reading.where(key) if sharded else "axolotl replicates without fsdp or deepspeed"
    over = shard * context if shard else ALL_LEFT if sharded else 1
    reading.set("shard", over, where)
    reading.set("zero", 3 if sharded else 0, where)
    _fsdp(reading)


def _fsdp(reading: Reading) -> None:
    """FSDP 1 names a strategy, FSDP 2 whether it reshards; keys stand with or without a prefix."""

    def key(name: str) -> str:
        long = f"fsdp_config.fsdp_{name}"
        return long if long in reading.document.entries else f"fsdp_config.{name}"

    reading.use("fsdp", "fsdp_version", "fsdp_config.fsdp_version")
    place = key("sharding_strategy")
    strategy = reading.word(place, STRATEGIES)
    if strategy:
        zero, kept, is_hybrid = strategy
        reading.set("zero", zero, reading.where(place))
        reading.set("keeps_gathered", kept, reading.where(place))
        if not zero:
            reading.set("shard", 1, reading.where(place))
        if is_hybrid:
            reading.note(place, NOT_MODELLED, "priced as sharding over all devices")
    place = key("reshard_after_forward")
    reshard = reading.flag(place)
    if reshard is not None:
        reading.set("keeps_gathered", not reshard, reading.where(place))
    if reading.flag(key("activation_checkpointing")):
        reading.set("recompute", "full", reading.where(key("activation_checkpointing")))
    if reading.flag(key("offload_params"), default=False):
        reading.set("offload", 1.0, reading.where(key("offload_params")))
        reading.set("offloads_weights", True, reading.where(key("offload_params")))

"""TRL's supervised fine-tuning: `trl sft --config FILE`, or the options of its command line.

Fields of SFTConfig (transformers' TrainingArguments among them), ModelConfig and ScriptArguments.
A device computes `per_device_train_batch_size` rows at a time, `gradient_accumulation_steps` times.
"""

from __future__ import annotations

from phalanx.planner.importers.adapters import read_targets
from phalanx.planner.importers.deepspeed import read_deepspeed
from phalanx.planner.importers.entries import Document
from phalanx.planner.importers.foreign import ALL_LEFT, ASSUMED, NOT_MODELLED, ForeignPlan
from phalanx.planner.importers.reading import Reading

_NOT_MODELLED = {
    "torch_compile": "torch.compile changes the speed of operators",
    "torch_compile_backend": "torch.compile changes the speed of operators",
    "torch_compile_mode": "torch.compile changes the speed of operators",
    "use_liger_kernel": "fused kernels keep fewer activations and logits",
    "activation_offloading": "activations in host memory",
    "attn_implementation": "attention is priced as the fused kind",
    "auto_find_batch_size": "the batch that is found is not known before",
    "use_dora": "magnitudes of weights are trained besides the adapters",
    "lora_modules_to_save": "modules that are trained whole besides the adapters",
    "neftune_noise_alpha": "noise on embeddings costs little",
    "optim_target_modules": "moments of low rank are not priced",
    "eval_strategy": "evaluation is not part of the price",
    "loss_type": "priced as cross-entropy",
    "accelerate_config": "a launch configuration of its own: read it as well to price its sharding",
}
_CHECKPOINTING = ("gradient", "activation")
_NOT_MODELLED |= dict.fromkeys(
    (f"{name}_checkpointing_kwargs" for name in _CHECKPOINTING),
    "priced as recomputation of every layer",
)
_MOMENT_BYTES = {"8bit": 2.0, "adafactor": 0.1, "sgd": 0.0, "lion_8bit": 1.0, "lion": 4.0}


def read(document: Document) -> ForeignPlan:
    """The plan of a TRL configuration.

    Raises:
        JobError: `foreign/value` with the line.
    """
    reading = Reading("trl", document, _NOT_MODELLED)
    reading.text("model_name_or_path", "model")
    if not reading.text("dataset_name", "data"):
        _mixture(reading)
    reading.use("dataset_config", "config", "model_revision")
    if reading.raw("command") not in (None, "sft"):
        text = "priced as supervised training: rollouts, rewards and references are not part of it"
        reading.note("command", NOT_MODELLED, text)
    _method(reading)
    _batch(reading)
    _precision(reading)
    _sharding(reading)
    return reading.finish()


def _mixture(reading: Reading) -> None:
    paths = [key for key in reading.document.entries if key.startswith("datasets.")]
    files = [key for key in paths if key.endswith(".data_files")]
    sources = files or [key for key in paths if key.endswith(".path")]
    if sources:
        reading.text(sources[0], "data")
    if len(sources) > 1:
        text = f"{len(sources)} data sets are mixed; the lengths of the first stand for all"
        reading.note(sources[1], ASSUMED, text)
    reading.use(*paths)


def _method(reading: Reading) -> None:
    is_adapter = reading.flag("use_peft", default=False)
    reading.set("method", "lora" if is_adapter else "full", reading.where("use_peft"))
    bits = 4 if reading.flag("load_in_4bit") else 8 if reading.flag("load_in_8bit") else 16
    fields = ("lora_r", "lora_alpha", "lora_dropout")
    targets = ("lora_target_modules", "lora_target_parameters")
    if is_adapter:
        reading.whole("lora_r", "lora_rank", default=16)
        reading.number("lora_alpha", "lora_alpha", default=32)
        reading.number("lora_dropout", "lora_dropout", default=0.05)
        if not read_targets(reading):
            text = "PEFT chooses (often q_proj and v_proj); priced with every linear layer"
            reading.assume("lora_target_modules", text)
        if bits < 16:
            reading.set("base_bits", bits, reading.where(f"load_in_{bits}bit"))
    reading.use(*fields, *targets)
    epochs = reading.number("num_train_epochs", default=3.0)
    steps = reading.whole("max_steps", default=-1, low=-1)
    if steps > 0:
        reading.set("steps", steps, reading.where("max_steps"))
    else:
        reading.set("epochs", epochs, reading.where("num_train_epochs"))
    reading.number("learning_rate", "lr", default=2e-5)


def _batch(reading: Reading) -> None:
    reading.whole("per_device_train_batch_size", "micro_rows", default=8)
    reading.whole("gradient_accumulation_steps", "num_micro", default=1)
    reading.whole("max_length", "row_tokens", default=1024)
    packed = reading.flag("packing", "packed", default=False)
    reading.use("packing_strategy", "padding_free", "pad_to_multiple_of")
    if not packed and reading.get("micro_rows") > 1:
        text = "rows of a batch are padded to the longest; priced as rows of max_length"
        reading.assume("packing", text)


def _precision(reading: Reading) -> None:
    words = {"float32": "fp32", "bfloat16": "bf16", "float16": "fp16", "auto": None}
    stored = reading.word("dtype", words, default="fp32")
    is_half = reading.flag("fp16", default=False)
    is_brain = reading.flag("bf16", default=not is_half)
    key = "fp16" if is_half else "bf16" if is_brain else "dtype"
    half = "fp16" if is_half else "bf16" if is_brain else stored or "fp32"
    reading.set("precision", half, reading.where(key))
    master = {"bf16": "bfloat16", "fp16": "float16"}.get(stored or "", "float32")
    reading.set("master_dtype", master, reading.where("dtype"))
    name = str(reading.text("optim", default="adamw_torch_fused"))
    found = [size for part, size in _MOMENT_BYTES.items() if part in name]
    size = min(found) if found else 8.0 if master == "float32" else 4.0
    reading.set("moment_bytes", size, reading.where("optim"))


def _sharding(reading: Reading) -> None:
    old = reading.flag("gradient_checkpointing", default=True)  # TRL's default, not transformers'
    again = reading.flag("activation_checkpointing", default=old)
    has_new = "activation_checkpointing" in reading.document.entries
    where = reading.where(f"{'activation' if has_new else 'gradient'}_checkpointing")
    reading.set("recompute", "full" if again else "none", where)
    reading.use(*(f"{name}_checkpointing_kwargs.use_reentrant" for name in _CHECKPOINTING))
    asked = reading.raw("fsdp")
    words = asked if isinstance(asked, list) else str(asked or "").replace(",", " ").split()
    folded = {str(each).lower() for each in words}
    if folded & {"full_shard", "hybrid_shard", "shard_grad_op", "hybrid_shard_zero2", "true"}:
        reading.set("zero", 3, reading.where("fsdp"))
        reading.set("shard", ALL_LEFT, reading.where("fsdp"))
        kept = bool(folded & {"shard_grad_op", "hybrid_shard_zero2"})
        reading.set("keeps_gathered", kept, reading.where("fsdp"))
        if folded & {"hybrid_shard", "hybrid_shard_zero2"}:
            reading.note("fsdp", NOT_MODELLED, "priced as sharding over all devices")
        if "offload" in folded:
            reading.set("offload", 1.0, reading.where("fsdp"))
            reading.set("offloads_weights", True, reading.where("fsdp"))
    reading.use("fsdp")
    if reading.raw("deepspeed"):
        read_deepspeed(reading, "deepspeed")

"""torchtitan job files (TOML, `torchtitan.config.JobConfig`).

Sizes of the mesh: dp_replicate * dp_shard * context * tensor * pipeline = devices; weights are
sharded over dp_shard * context ranks. With a pipeline, `local_batch_size` rows are cut into
micro-batches of `pipeline_parallel_microbatch_size`.
"""

from __future__ import annotations

from math import ceil

from phalanx.planner.importers.entries import Document
from phalanx.planner.importers.foreign import ALL_LEFT, ASSUMED, NOT_MODELLED, ForeignPlan
from phalanx.planner.importers.reading import Reading

# model.name, model.flavor -> published name, layers (torchtitan/models/*/__init__.py)
MODELS = {
    ("llama3", "8B"): ("meta-llama/Llama-3.1-8B", 32),
    ("llama3", "70B"): ("meta-llama/Llama-3.1-70B", 80),
    ("llama3", "405B"): ("meta-llama/Llama-3.1-405B", 126),
    ("llama4", "17bx16e"): ("meta-llama/Llama-4-Scout-17B-16E", 48),
    ("llama4", "17bx128e"): ("meta-llama/Llama-4-Maverick-17B-128E", 48),
    ("deepseek_v3", "16B"): ("deepseek-ai/DeepSeek-V2-Lite", 27),
    ("deepseek_v3", "236B"): ("deepseek-ai/DeepSeek-V2", 60),
    ("deepseek_v3", "671B"): ("deepseek-ai/DeepSeek-V3", 61),
    ("qwen3", "0.6B"): ("Qwen/Qwen3-0.6B", 28),
    ("qwen3", "1.7B"): ("Qwen/Qwen3-1.7B", 28),
    ("qwen3", "4B"): ("Qwen/Qwen3-4B", 36),
    ("qwen3", "8B"): ("Qwen/Qwen3-8B", 36),
    ("qwen3", "14B"): ("Qwen/Qwen3-14B", 40),
    ("qwen3", "32B"): ("Qwen/Qwen3-32B", 64),
    ("qwen3", "30B-A3B"): ("Qwen/Qwen3-30B-A3B", 48),
    ("qwen3", "235B-A22B"): ("Qwen/Qwen3-235B-A22B", 94),
    ("gpt_oss", "20b"): ("openai/gpt-oss-20b", 24),
    ("gpt_oss", "120b"): ("openai/gpt-oss-120b", 36),
}
# pipeline_parallel_schedule -> (schedule, chunks of a rank)
SCHEDULES = {
    "GPipe": ("gpipe", 1),
    "1F1B": ("1f1b", 1),
    "Interleaved1F1B": ("interleaved", 2),
    "InterleavedZeroBubble": ("zero-bubble", 2),
    "ZBVZeroBubble": ("zbv", 2),
    "DualPipeV": ("dualpipe-v", 2),
}
_NOT_MODELLED = {
    "compile": "torch.compile changes the speed of operators; prices are for compiled models",
    "parallelism.enable_async_tensor_parallel": "overlaps tensor-parallel exchanges with products",
    "parallelism.disable_loss_parallel": "logits are then gathered on every tensor rank",
    "parallelism.pipeline_parallel_schedule_csv": "a schedule of its own is not read",
    "parallelism.module_fqns_per_model_part": "stages are priced as equal shares of the layers",
    "parallelism.pipeline_parallel_first_stage_less_layers": "stages are priced as equal shares",
    "parallelism.pipeline_parallel_last_stage_less_layers": "stages are priced as equal shares",
    "parallelism.expert_parallel_comm_backend": "all-to-alls are priced as those of NCCL",
    "optimizer.early_step_in_backward": "frees gradients during the backward pass",
    "fault_tolerance": "replicas that come and go are not part of the price",
    "validation": "validation steps are not part of the price",
    "activation_checkpoint.memory_budget": "the compiler's own choice of activations is not read",
}
_RECOMPUTE = {"none": "none", "full": "full", "selective": "selective"}


def read(document: Document) -> ForeignPlan:
    """The plan of a torchtitan job.

    Raises:
        JobError: `foreign/value` with the line.
    """
    reading = Reading("torchtitan", document, _NOT_MODELLED)
    _model(reading)
    _mesh(reading)
    _batch(reading)
    _memory(reading)
    return reading.finish()


def _model(reading: Reading) -> None:
    name = reading.text("model.name", default="llama3")
    flavor = reading.text("model.flavor", default="debugmodel")
    base = str(flavor).removesuffix("_flex").removesuffix("_varlen").removesuffix("_irope")
    known, layers = MODELS.get((str(name), base), ("", 0))
    where = f"{reading.where('model.name')}, {reading.where('model.flavor')}"
    if known:
        reading.set("model", known, where)
        reading.set("sizes", {"num_hidden_layers": layers}, where)
    elif assets := reading.text("model.hf_assets_path"):
        reading.set("model", assets, reading.where("model.hf_assets_path"))
    else:
        reading.note("model.flavor", ASSUMED, f"{name} {flavor} is no published model: name one")
    reading.use("model.hf_assets_path", "model.tokenizer_path")
    reading.text("training.dataset_path", "data") or reading.text("training.dataset", "data")
    reading.use("training.dataset", "training.dataset_path")
    reading.set("method", "pretrain", "torchtitan trains all weights")
    reading.number("optimizer.lr", "lr", default=8e-4)
    reading.whole("training.steps", "steps", default=10_000)
    converters = [str(each).lower() for each in reading.names("model.converters", default=()) or ()]
    is_fp8 = any("float8" in each or ".mx" in each for each in converters)
    half = reading.word(
        "training.mixed_precision_param", {"bfloat16": "bf16", "float32": "fp32"}, default="bf16"
    )
    where = "model.converters" if is_fp8 else "training.mixed_precision_param"
    reading.set("precision", "fp8" if is_fp8 else half, reading.where(where))
    words = {"float32": "float32", "bfloat16": "bfloat16"}
    dtype = reading.word("training.dtype", words, "master_dtype", default="float32")
    where = "two moments in training.dtype"
    reading.set("moment_bytes", 8.0 if dtype == "float32" else 4.0, where)


def _mesh(reading: Reading) -> None:
    at = "parallelism."
    reading.whole(f"{at}tensor_parallel_degree", "tensor", default=1)
    reading.whole(f"{at}pipeline_parallel_degree", "pipeline", default=1)
    context = reading.whole(f"{at}context_parallel_degree", "context", default=1)
    reading.whole(f"{at}expert_parallel_degree", "expert", default=1)
    reading.whole(f"{at}expert_tensor_parallel_degree", "expert_tensor", default=1)
    reading.whole(f"{at}data_parallel_replicate_degree", "replicate", default=1)
    shard = reading.whole(f"{at}data_parallel_shard_degree", default=ALL_LEFT, low=ALL_LEFT)
    if shard == 0:
        raise reading.error(f"{at}data_parallel_shard_degree", "must be -1 or at least 1", [-1, 1])
    where = reading.where(f"{at}data_parallel_shard_degree")
    over = shard if shard == ALL_LEFT else shard * context  # the mesh that weights are sharded on
    reading.set("shard", over, where)
    reading.set("zero", 0 if over == 1 else 3, where)
    words = {"gather": "all-gather", "allgather": "all-gather", "alltoall": "ring"}
    reading.word(f"{at}context_parallel_rotate_method", words, "context_kind", default="all-gather")
    reading.set(
        "sequence_parallel",
        True,
        "torchtitan splits tokens over the tensor axis where there is one",
    )
    policies = {"default": None, "always": False, "never": True}
    kept = reading.word(f"{at}fsdp_reshard_after_forward", policies)
    if kept is None:  # without a pipeline weights are resharded, with one they stay
        kept = reading.get("pipeline") > 1
    reading.set("keeps_gathered", kept, reading.where(f"{at}fsdp_reshard_after_forward"))


def _batch(reading: Reading) -> None:
    at = "parallelism."
    reading.whole("training.seq_len", "row_tokens", default=2048)
    local = reading.whole("training.local_batch_size", default=8)
    where = reading.where("training.local_batch_size")
    rows = reading.whole("training.global_batch_size", default=-1, low=-1)
    if rows > 0:
        reading.set("step_rows", rows, reading.where("training.global_batch_size"))
    micro = reading.whole(f"{at}pipeline_parallel_microbatch_size", default=1)
    if reading.get("pipeline") > 1:
        if local % micro:
            rule = f"must divide training.local_batch_size, which is {local}"
            raise reading.error(f"{at}pipeline_parallel_microbatch_size", rule, [1, local])
        reading.set("micro_rows", micro, reading.where(f"{at}pipeline_parallel_microbatch_size"))
        _schedule(reading)
    else:
        micro = local
        reading.use(f"{at}pipeline_parallel_schedule", f"{at}pipeline_parallel_layers_per_stage")
        reading.set("micro_rows", local, where)
    if rows <= 0:
        reading.set("num_micro", local // micro, where)
    reading.set("packed", True, "torchtitan fills rows with the text of several documents")


def _schedule(reading: Reading) -> None:
    key, at = "parallelism.pipeline_parallel_schedule", "parallelism.pipeline_parallel_"
    schedule, chunks = reading.word(key, SCHEDULES, default=SCHEDULES["1F1B"])
    reading.set("schedule", schedule, reading.where(key))
    reading.set("virtual", chunks, reading.where(key))
    each = reading.whole(f"{at}layers_per_stage")
    layers = (reading.get("sizes") or {}).get("num_hidden_layers")
    if each and layers and chunks > 1:
        first = reading.whole(f"{at}first_stage_less_layers", default=1, low=0)
        last = reading.whole(f"{at}last_stage_less_layers", default=1, low=0)
        chunks = max(1, ceil((layers + first + last) / each) // reading.get("pipeline"))
        reading.set("virtual", chunks, reading.where(f"{at}layers_per_stage"))
    elif each and chunks > 1:
        text = f"{each} layers to a stage decide the chunks of a rank; priced with {chunks}"
        reading.note(f"{at}layers_per_stage", NOT_MODELLED, text)


def _memory(reading: Reading) -> None:
    mode = reading.text("activation_checkpoint.mode", default="selective")
    key = "activation_checkpoint.mode"
    if mode == "memory_budget":
        reading.set("recompute", "selective", reading.where(key))
        reading.note(key, NOT_MODELLED, "memory_budget is priced as selective recomputation")
    else:
        reading.word(key, _RECOMPUTE, "recompute", default="selective")
    option = reading.text("activation_checkpoint.selective_ac_option", default="2")
    if reading.get("recompute") == "selective" and option != "op":
        text = f"every {option}nd layer is recomputed whole; priced as selective by operator"
        reading.note("activation_checkpoint.selective_ac_option", NOT_MODELLED, text)
    if reading.flag("training.enable_cpu_offload", default=False):
        where = reading.where("training.enable_cpu_offload")
        reading.set("offload", 1.0, where)
        reading.set("offloads_weights", True, where)

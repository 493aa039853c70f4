"""Plans to write: one that most targets can express, and arbitrary ones."""

from hypothesis import strategies as st

from phalanx.cost.training_plans import CONTEXT_KINDS, RECOMPUTE, SCHEDULES
from phalanx.planner.importers import ForeignPlan

# of meta-llama/Llama-3.1-8B/config.json
LLAMA_8B = {
    "num_hidden_layers": 32,
    "hidden_size": 4096,
    "intermediate_size": 14336,
    "num_attention_heads": 32,
    "num_key_value_heads": 8,
    "head_dim": 128,
    "vocab_size": 128256,
    "tie_word_embeddings": False,
    "hidden_act": "silu",
}


def trained(**changed):
    """Full fine-tuning of Llama 3.1 8B on 16 devices: FSDP in groups of 8, two replicas."""
    values = {
        "kind": "phalanx",
        "model": "meta-llama/Llama-3.1-8B",
        "sizes": LLAMA_8B,
        "data": "chat.jsonl",
        "method": "full",
        "devices": 16,
        "zero": 3,
        "shard": 8,
        "replicate": 2,
        "micro_rows": 1,
        "row_tokens": 4096,
        "num_micro": 2,
        "steps": 100,
        "lr": 1e-4,
        "precision": "bf16",
        "master_dtype": "float32",
        "recompute": "full",
        "packed": True,
    }
    return ForeignPlan(**(values | changed))


def served(**changed):
    """Llama 3.1 8B on 8 devices: two replicas of four, in fp8."""
    values = {
        "kind": "phalanx",
        "role": "serve",
        "model": "meta-llama/Llama-3.1-8B",
        "tensor": 4,
        "replicate": 2,
        "devices": 8,
        "max_tokens": 32_768,
        "max_running": 64,
        "caches_prefixes": False,
        "chunks_prefill": True,
        "weight_bits": 8,
        "precision": "fp8",
        "kv_bits": 8,
        "memory_frac": 0.9,
    }
    return ForeignPlan(**(values | changed))


@st.composite
def training_plans(draw):
    """Any combination of what a training plan can say; many that no target has words for."""
    sizes = st.sampled_from([1, 1, 2, 4])
    tensor, pipeline, context, replicate, inner = (draw(sizes) for _ in range(5))
    zero = draw(st.sampled_from([0, 1, 2, 3, 3, 3]))
    data = inner * replicate
    schedule = (
        draw(st.sampled_from([*SCHEDULES, "1f1b", "1f1b", "interleaved"]))
        if pipeline > 1
        else "1f1b"
    )
    many = schedule not in ("gpipe", "1f1b")
    method = draw(st.sampled_from(["pretrain", "full", "lora"]))
    adapters = {"lora_rank": 8, "lora_alpha": 16.0, "lora_dropout": 0.05}
    adapters["lora_targets"] = draw(st.sampled_from([("q_proj", "v_proj"), ("o_proj",)]))
    return trained(
        devices=tensor * pipeline * context * data,
        tensor=tensor,
        pipeline=pipeline,
        context=context,
        expert=draw(st.sampled_from([1, 1, 1, 2])),
        expert_tensor=draw(sizes),
        zero=zero,
        shard=inner * context if zero else 1,
        replicate=replicate if zero else None,
        keeps_gathered=draw(st.booleans()),
        virtual=draw(st.sampled_from([2, 2, 4])) if many else 1,
        schedule=schedule,
        context_kind=draw(st.sampled_from(CONTEXT_KINDS)),
        sequence_parallel=draw(st.booleans()),
        micro_rows=draw(st.integers(1, 3)),
        row_tokens=draw(st.sampled_from([512, 4096, 8191])),
        num_micro=draw(st.integers(1, 5)),
        recompute=draw(st.sampled_from(RECOMPUTE)),
        offload=draw(st.sampled_from([0.0, 0.0, 0.0, 0.0, 1.0, 0.5])),
        precision=draw(st.sampled_from(["bf16", "bf16", "fp16", "fp8", "fp32", "fp4"])),
        master_dtype=draw(st.sampled_from(["float32", "float32", "bfloat16"])),
        method=method,
        base_bits=draw(st.sampled_from([None, 4])) if method == "lora" else None,
        **(adapters if method == "lora" else {}),
    )


@st.composite
def serving_plans(draw):
    """Any server."""
    tensor, pipeline, data = (draw(st.sampled_from([1, 2, 4])) for _ in range(3))
    spreads = draw(st.booleans())
    bits, precision = draw(
        st.sampled_from([(None, None), (None, "bf16"), (8, "fp8"), (4, "bf16"), (4, "fp8")])
    )
    return served(
        tensor=tensor,
        pipeline=pipeline,
        replicate=data,
        devices=tensor * pipeline * data,
        expert=tensor * data if spreads else 1,
        expert_tensor=None if spreads else tensor,
        max_tokens=draw(st.integers(8, 1 << 20)),
        max_running=draw(st.integers(1, 4096)),
        max_step_tokens=draw(st.none() | st.integers(256, 1 << 20)),
        memory_frac=draw(st.sampled_from([0.5, 0.9, 1.0])),
        weight_bits=bits,
        precision=precision,
        kv_bits=draw(st.sampled_from([None, 8, 4])),
        caches_prefixes=draw(st.booleans()),
    )

"""Configurations as people write them, one of each program."""

ACCELERATE = """\
compute_environment: LOCAL_MACHINE
distributed_type: FSDP
fsdp_config:
  fsdp_sharding_strategy: HYBRID_SHARD
  fsdp_activation_checkpointing: true
  fsdp_offload_params: false
  fsdp_auto_wrap_policy: TRANSFORMER_BASED_WRAP
mixed_precision: bf16
num_machines: 2
num_processes: 16
"""

AXOLOTL = """\
base_model: NousResearch/Meta-Llama-3.1-8B
load_in_4bit: true
adapter: qlora
datasets:
  - path: tatsu-lab/alpaca
    type: alpaca
  - path: more.jsonl
    type: chat_template
sequence_len: 4096
sample_packing: true
lora_r: 32
lora_alpha: 16
lora_dropout: 0.05
lora_target_linear: true
micro_batch_size: 2
gradient_accumulation_steps: 4
num_epochs: 3
optimizer: paged_adamw_8bit
learning_rate: 2e-4
bf16: auto
gradient_checkpointing: true
flash_attention: true
warmup_ratio: 0.1
rl: dpo
colour: blue
"""

TRL = """\
model_name_or_path: Qwen/Qwen3-8B
dataset_name: trl-lib/Capybara
use_peft: true
lora_r: 32
lora_alpha: 64
lora_target_modules: [q_proj, v_proj]
load_in_4bit: true
per_device_train_batch_size: 2
gradient_accumulation_steps: 8
max_length: 2048
packing: true
learning_rate: 2.0e-4
num_train_epochs: 2
optim: adamw_8bit
dtype: bfloat16
gradient_checkpointing: true
gradient_checkpointing_kwargs:
  use_reentrant: false
use_liger_kernel: true
"""

TITAN = """\
[job]
description = "Llama 3 405B"

[model]
name = "llama3"
flavor = "405B"
converters = ["quantize.linear.float8"]

[optimizer]
lr = 8e-5

[training]
local_batch_size = 16
seq_len = 8192
steps = 3000
dataset = "c4"

[parallelism]
data_parallel_replicate_degree = 2
data_parallel_shard_degree = 4
tensor_parallel_degree = 8
pipeline_parallel_degree = 8
pipeline_parallel_schedule = "Interleaved1F1B"
pipeline_parallel_layers_per_stage = 4
context_parallel_degree = 2
enable_async_tensor_parallel = true

[activation_checkpoint]
mode = "full"

[compile]
enable = true

[metrics]
log_freq = 10
"""

MEGATRON = """\
#!/bin/bash
# 16 nodes
GPUS_PER_NODE=8
NUM_NODES=${NNODES:-16}
WORLD_SIZE=$(($GPUS_PER_NODE * $NUM_NODES))
TP=4
MODEL_ARGS=(
    --num-layers 32 --hidden-size 4096
    --ffn-hidden-size 14336      # gated
    --num-attention-heads 32
    --group-query-attention
    --num-query-groups 8
    --vocab-size 128256
    --swiglu
    --untie-embeddings-and-output-weights
)
TRAINING="--micro-batch-size 2 \\
  --global-batch-size 1024 \\
  --train-iters 500 --lr 3.0e-4"
PARALLEL_ARGS=( --tensor-model-parallel-size $TP
    --pipeline-model-parallel-size 2 --sequence-parallel
    --num-layers-per-virtual-pipeline-stage 4
    --context-parallel-size 2 --use-distributed-optimizer )
torchrun --nproc_per_node $GPUS_PER_NODE --nnodes $NUM_NODES \\
    pretrain_gpt.py ${MODEL_ARGS[@]} $TRAINING "${PARALLEL_ARGS[@]}" \\
    --seq-length 8192 --bf16 --recompute-activations \\
    --data-path "$DATA" --overlap-grad-reduce --clip-grad 1.0
"""

VLLM = """\
#!/bin/bash
TP=4
vllm serve meta-llama/Llama-3.1-70B-Instruct -tp $TP --data-parallel-size=2 \\
  --max-model-len 32k --max_num_seqs 128 --enable-expert-parallel \\
  --quantization fp8 --no-enable-prefix-caching --kv-cache-dtype fp8_e4m3 \\
  --enforce-eager --frobnicate 3
"""

SAMPLES = {
    "accelerate": ("fsdp.yaml", ACCELERATE),
    "axolotl": ("qlora.yml", AXOLOTL),
    "trl": ("sft.yaml", TRL),
    "torchtitan": ("train.toml", TITAN),
    "megatron": ("train.sh", MEGATRON),
    "vllm": ("serve.sh", VLLM),
}

"""Counts of parameters equal those of transformers' own models, at awkward sizes."""

import pytest

from phalanx.errors import JobError
from phalanx.models.shape_keys import shape_of_keys

BASE = {
    "vocab_size": 97,
    "hidden_size": 48,
    "intermediate_size": 80,
    "num_hidden_layers": 6,
    "num_attention_heads": 6,
    "num_key_value_heads": 2,
    "head_dim": 8,
    "max_position_embeddings": 64,
}
GPT = {"vocab_size": 97, "n_embd": 48, "n_layer": 3, "n_head": 6, "n_positions": 64}
EXPERTS = {
    "num_experts": 5,
    "num_local_experts": 5,
    "n_routed_experts": 5,
    "num_experts_per_tok": 2,
    "moe_intermediate_size": 28,
    "shared_expert_intermediate_size": 36,
}
LATENT = {
    "q_lora_rank": 20,
    "kv_lora_rank": 16,
    "qk_rope_head_dim": 4,
    "qk_nope_head_dim": 8,
    "v_head_dim": 10,
    "n_shared_experts": 1,
    "first_k_dense_replace": 2,
    "n_group": 1,
    "topk_group": 1,
}
INDEX = {"index_n_heads": 4, "index_head_dim": 8, "index_topk": 3}
LINEAR = {
    "linear_num_value_heads": 6,
    "linear_num_key_heads": 3,
    "linear_key_head_dim": 8,
    "linear_value_head_dim": 10,
}
MAMBA = {
    "layers_block_type": ["mamba", "moe", "mamba", "attention", "moe", "mlp"],
    "mamba_num_heads": 6,
    "mamba_head_dim": 8,
    "ssm_state_size": 10,
    "n_groups": 2,
    "moe_shared_expert_intermediate_size": 36,
    "moe_latent_size": 12,
    "n_shared_experts": 1,
}
CASES = {
    "gptj": GPT | {"rotary_dim": 4},
    "opt": BASE | {"ffn_dim": 80, "word_embed_proj_dim": 48},
    "bloom": {"vocab_size": 97, "hidden_size": 48, "n_layer": 3, "n_head": 6},
    "mpt": {"vocab_size": 97, "d_model": 48, "n_layers": 3, "n_heads": 6, "max_seq_len": 64},
    "falcon": {key: BASE[key] for key in list(BASE)[:5] if key != "intermediate_size"},
    "gpt_neox": BASE,
    "gemma2": BASE,
    "cohere": BASE,
    "qwen2": BASE,
    "nemotron": BASE,
    "starcoder2": BASE | {"use_bias": True},
    "mixtral": BASE | EXPERTS,
    "qwen2_moe": BASE | EXPERTS,
    "gpt_oss": BASE | EXPERTS,
    "minimax_m2": BASE | EXPERTS,
    "glm4_moe": BASE | EXPERTS | {"n_shared_experts": 1, "first_k_dense_replace": 2},
    "hy_v3": BASE | EXPERTS | {"num_shared_experts": 1},
    "llama4_text": BASE
    | EXPERTS
    | {"intermediate_size_mlp": 88, "interleave_moe_layer_step": 2, "num_experts_per_tok": 1},
    "deepseek_v2": BASE | EXPERTS | LATENT,
    "deepseek_v3": BASE | EXPERTS | LATENT,
    "deepseek_v32": BASE | EXPERTS | LATENT | INDEX,
    "deepseek_v4": BASE
    | EXPERTS
    | INDEX
    | {"q_lora_rank": 20, "o_groups": 2, "o_lora_rank": 12, "qk_rope_head_dim": 4}
    | {"intermediate_size": 28, "n_shared_experts": 1},
    "qwen3_next": BASE | EXPERTS | LINEAR,
    "qwen3_5_text": BASE | LINEAR,
    "nemotron_h": BASE | EXPERTS | MAMBA,
}


@pytest.mark.parametrize("kind", CASES)
def test_parameters_equal_those_of_transformers(kind):
    """Buffers that correct a router stand in its checkpoint as well, so they count."""
    import torch
    import transformers

    config = transformers.AutoConfig.for_model(kind, **CASES[kind])
    with torch.device("meta"):
        model = transformers.AutoModelForCausalLM.from_config(config)
    tensors = dict(model.named_parameters()) | {
        name: each for name, each in model.named_buffers() if name.endswith("correction_bias")
    }
    stored = sum(tensor.numel() for tensor in tensors.values())
    assert shape_of_keys(CASES[kind] | {"model_type": kind}).num_params == stored


def test_layers_that_qwen_keeps_dense_have_no_experts():
    sparse = BASE | {"model_type": "qwen3_moe"} | EXPERTS
    whole = shape_of_keys(sparse)
    listed = shape_of_keys(sparse | {"mlp_only_layers": [0, 3]})
    stepped = shape_of_keys(sparse | {"decoder_sparse_step": 3})

    def dense(shape):
        return sum(each.count for each in shape.layers if not each.feed_forward.num_experts)

    assert [dense(each) for each in (whole, listed, stepped)] == [0, 2, 4]


@pytest.mark.parametrize(
    ("kind", "key", "value"),
    [
        ("llama", "num_hidden_layers", 2**31 - 1),
        ("llama", "attention_bias", "false"),
        ("qwen3_moe", "mlp_only_layers", 3),
        ("nemotron_h", "layers_block_type", 1.5),
        ("nemotron_h", "layers_block_type", [[]]),
    ],
)
def test_a_value_that_no_config_can_mean_is_refused_by_its_key(kind, key, value):
    table = BASE | EXPERTS | MAMBA | {"model_type": kind, key: value}
    with pytest.raises(JobError) as caught:
        shape_of_keys(table)
    assert caught.value.code == "job/bad-value"

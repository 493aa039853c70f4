"""What autograd keeps of a layer of transformers and PEFT, held against their profile."""

import pytest
import torch

from phalanx.cost.memory_activations import layer_bytes
from phalanx.cost.memory_software import memory_profile
from phalanx.cost.model_shape import AttentionShape, FeedForwardShape, LayerShape

TOKENS, HIDDEN, WIDTH, HEADS, KV_HEADS = 512, 256, 896, 8, 2
ATTENTION = ["q_proj", "k_proj", "v_proj", "o_proj"]


def kept_bytes(num_layers, adapters):
    """Bytes of the storages that autograd keeps of a forward pass, weights left out."""
    from peft import LoraConfig, get_peft_model  # seconds, which only this test pays
    from transformers import LlamaConfig, LlamaForCausalLM

    config = LlamaConfig(
        hidden_size=HIDDEN, intermediate_size=WIDTH, num_hidden_layers=num_layers, vocab_size=64,
        num_attention_heads=HEADS, num_key_value_heads=KV_HEADS, attn_implementation="sdpa",
    )  # fmt: skip
    model = LlamaForCausalLM(config).to(torch.bfloat16).train()
    decoder = model.model
    if adapters:
        words = {"attention": ATTENTION, "all": "all-linear"}
        targets = list(adapters) if isinstance(adapters, tuple) else words[adapters]
        get_peft_model(model, LoraConfig(r=8, target_modules=targets))
    own = {each.untyped_storage().data_ptr() for each in model.state_dict().values()}
    kept = {}

    def keep(tensor):
        storage = tensor.untyped_storage()
        if storage.data_ptr() not in own:
            kept[storage.data_ptr()] = (storage.nbytes(), tensor)  # alive, so the key is its own
        return tensor

    with torch.autograd.graph.saved_tensors_hooks(keep, lambda tensor: tensor):
        result = decoder(torch.zeros(1, TOKENS, dtype=torch.long))
    del result
    return sum(size for size, _ in kept.values())


@pytest.mark.parametrize(
    "adapters",
    ["", "attention", "all", ("q_proj", "v_proj"), ("down_proj",), ("o_proj", "up_proj")],
)
def test_a_layer_keeps_what_the_profile_says(adapters):
    attention = AttentionShape(num_heads=HEADS, num_kv_heads=KV_HEADS, head_dim=HIDDEN // HEADS)
    layer = LayerShape(count=1, attention=attention, feed_forward=FeedForwardShape(width=WIDTH))
    said = layer_bytes([layer], HIDDEN, memory_profile("transformers"), adapters)
    measured = (kept_bytes(2, adapters) - kept_bytes(1, adapters)) / TOKENS
    assert said.stream + said.inner + said.shared_heads == pytest.approx(measured, rel=0.06)

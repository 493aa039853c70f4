"""Small models of awkward shapes that the model tests share, and their transformers twins."""

from __future__ import annotations

import torch

from phalanx.models.config import to_huggingface
from phalanx.models.decoder import Decoder
from phalanx.models.parameters import initial_values, load_parameters
from phalanx.models.spec import DecoderConfig, canonical_tensors, small_config

CONFIGS: dict[str, DecoderConfig] = {
    "grouped_queries": small_config(
        vocab_size=97,
        hidden_size=48,
        intermediate_size=80,
        num_layers=4,
        num_heads=4,
        num_kv_heads=2,
        head_dim=16,
        window=5,
        full_every=3,
        dtype="float32",
    ),
    "one_kv_head_capped": small_config(
        vocab_size=131,
        hidden_size=36,
        intermediate_size=52,
        num_layers=3,
        num_heads=3,
        num_kv_heads=1,
        head_dim=24,
        window=140,
        full_every=2,
        dtype="float32",
        logit_soft_cap=3.0,
        query_scale=17**-0.5,
        norm_eps=1e-4,
    ),
    "only_full_layers": small_config(
        vocab_size=64,
        hidden_size=32,
        intermediate_size=48,
        num_layers=2,
        num_heads=4,
        num_kv_heads=4,
        head_dim=8,
        full_every=1,
        dtype="float32",
    ),
}


def random_decoder(config: DecoderConfig, seed: int = 1) -> Decoder:
    """Fresh matrices, norms that are not the identity, layer scalars that are not 1."""
    decoder = Decoder(config)
    load_parameters(decoder, initial_values(seed, canonical_tensors(config).values()))
    generator = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for name, parameter in decoder.named_parameters():
            if parameter.dim() == 1:
                mean = 1.0 if name.endswith("layer_scalar") else 1.0 - config.norm_offset
                noise = 0.3 * torch.randn(parameter.shape, generator=generator)
                parameter.copy_(mean + noise)
            else:
                parameter.mul_(5.0)  # so that the layers matter beside the residual stream
    return decoder


def random_tokens(config: DecoderConfig, count: int, seed: int = 2) -> torch.Tensor:
    """Token ids, [count]; never the pad token, whose embedding transformers does not train."""
    generator = torch.Generator().manual_seed(seed)
    return torch.randint(1, config.vocab_size, (count,), generator=generator)


def transformers_twin(decoder: Decoder, **options):
    """The transformers model of the same config with the same weights."""
    from transformers import AutoConfig, AutoModelForCausalLM

    table = to_huggingface(decoder.config)
    table.pop("architectures")
    config = AutoConfig.for_model(**(table | options))
    twin = AutoModelForCausalLM.from_config(config).eval().to(next(decoder.parameters()).dtype)
    missing, unexpected = twin.load_state_dict(decoder.state_dict(), strict=False)
    assert missing == (["lm_head.weight"] if decoder.config.tied_head else []) and not unexpected
    return twin

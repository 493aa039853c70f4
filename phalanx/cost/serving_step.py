"""Seconds of an engine's steps on devices that are not here: formulas times fitted shares.

A decoding step reads every weight that its rows use, multiplies, reads what is cached, and meets
its peers twice a layer; at small batches starting all that costs more than doing it. A prompt is
bound by arithmetic. `cost.serving` prices this machine's own engine from measured steps; this file
prices published accelerators and engines. `rates` are columns of `cost.serving_efficiency`.

Sources: Seesaw (arXiv 2503.06433, appendix A: T = max(weights, products) + max(cache, scores) +
network); absorbed latent attention (DeepSeek-V2, arXiv 2405.04434). What differs: maxima are
smooth, experts are read as far as the batch touches them, each collective has a start, and every
term has a share that published steps reach.

Legend: b rows of a replica's micro-batch, G devices of a stage, n tokens of a prompt.
"""

from __future__ import annotations

from collections.abc import Mapping

import numpy as np

from phalanx.cost.serving_plans import ServingPlans
from phalanx.cost.serving_work import Column, ServingWork

Rates = Mapping[str, Column]
Parts = dict[str, Column]
_SHARPNESS = 3.0  # of the smooth maximum: two equal times cost 1.26 of one
_ACTIVATION_BYTES = 2.0
_STATE_BYTES = 4.0
_HEAD_BYTES = 2.0
_MAX_SKEW = 3.0


def touched_experts(experts: Column, active: Column, tokens: Column) -> Column:
    """Experts that at least one of `tokens` chooses, each choosing `active` at random."""
    return experts * -np.expm1(tokens * np.log1p(-np.minimum(active / experts, 1.0 - 1e-12)))


def weight_bytes(plans: ServingPlans) -> Column:
    """Bytes of weights on a device; embedding and head cut by tensor parallelism, in bf16."""
    work = plans.work
    outside = (work.attention_params + work.dense_params) / plans.tensor + work.whole_params
    experts = work.expert_params / plans.stage_devices * plans.expert_bytes
    tables = 2.0 * work.vocab * work.hidden / plans.tensor * _HEAD_BYTES
    return (outside * plans.dense_bytes + experts + tables) / plans.pipeline


def kv_token_bytes(plans: ServingPlans, context: Column | float) -> Column:
    """Bytes that a device keeps of a token, averaged over a context of that length."""
    elements = plans.work.kept_per_token(plans.tensor, context)
    return elements * plans.kv_bytes / plans.pipeline


def kv_room_tokens(plans: ServingPlans, context: Column | float) -> Column:
    """Cached tokens of one attention replica: usable memory less weights and activations.

    Below 0: the weights alone do not fit. A linear attention's states count as tokens of the
    requests that hold them.
    """
    work = plans.work
    activations = 8192.0 * work.hidden * 8.0 * _ACTIVATION_BYTES + 2.0**30
    room = plans.memory - weight_bytes(plans) - activations
    states = (work.kinds.count * work.kinds.state).sum(axis=-1) * _STATE_BYTES
    of_states = states / plans.tensor / plans.pipeline / np.maximum(context, 1.0)
    return room / np.maximum(kv_token_bytes(plans, context) + of_states, 1e-9)


def decode_parts(plans: ServingPlans, rows: Column, context: Column, rates: Rates) -> Parts:
    """Seconds between two tokens of each request, by what they are spent on.

    Args:
        rows: requests that decode in each attention replica; a pipeline has `rows / pipeline` of
            them in each stage, so every stage reads its weights once per micro-batch.
        context: tokens that they hold, on average.
    """
    work = plans.work
    batch = np.maximum(rows / plans.pipeline, 1.0)
    return {
        "weights": _decode_products(plans, batch, rates),
        "attention": _decode_attention(plans, batch, context, rates),
        "network": _network(plans, batch, rates),
        "layers": _layer_starts(work, rates),
        "step": rates["step_s"] + rows * rates["row_s"],
    }


def decode_s(plans: ServingPlans, rows: Column, context: Column, rates: Rates) -> Column:
    """All parts of `decode_parts`, [N] seconds."""
    return _total(decode_parts(plans, rows, context, rates))


def prefill_parts(
    plans: ServingPlans,
    tokens: Column,
    sequences: Column,
    rates: Rates,
    cached: Column | float = 0.0,
) -> Parts:
    """Seconds of computing prompts, all replicas of the engine at once, by what they are spent on.

    Args:
        tokens: of each prompt.
        sequences: prompts that one replica computes together.
        cached: first tokens of each that are not computed; the others attend to them.
    """
    work = plans.work
    new = tokens - cached
    every = new * sequences
    flops = 2.0 * (work.attention_params + work.dense_params) / plans.tensor
    flops = flops + 2.0 * work.whole_params
    small = 1.0 + rates["small_tokens"] / every
    reads = weight_bytes(plans) * plans.pipeline / (plans.bandwidth * rates["weight_share"])
    products = every * small * flops / plans.dense_flops
    products = products + every * small * work.expert_flops / plans.tensor / plans.expert_flops
    kinds = work.kinds
    seen = _causal_pairs(tokens, work) - _causal_pairs(cached + np.zeros_like(tokens), work)
    pairs = (kinds.count * seen * kinds.prefill_flops).sum(axis=-1)
    states = (kinds.count * kinds.state_flops).sum(axis=-1) * new
    indices = (kinds.count * kinds.index_flops).sum(axis=-1) * (tokens**2 - cached**2) / 2.0
    scores = (pairs + states) / plans.tensor + indices
    scores = sequences * scores / plans.attention_flops
    chunks = np.ceil(every / rates["chunk_tokens"])
    return {
        "weights": smooth_max(reads, products / rates["prefill_share"]),
        "attention": scores / rates["score_share"],
        "network": _network(plans, every, rates),
        "layers": chunks * _layer_starts(work, rates) * rates["eager"],
        "step": chunks * rates["step_s"],
    }


def prefill_s(
    plans: ServingPlans,
    tokens: Column,
    sequences: Column,
    rates: Rates,
    cached: Column | float = 0.0,
) -> Column:
    """All parts of `prefill_parts`, [N] seconds."""
    return _total(prefill_parts(plans, tokens, sequences, rates, cached))


def smooth_max(first: Column, second: Column) -> Column:
    """A maximum without a corner: kernels near the ridge reach neither limit."""
    return (first**_SHARPNESS + second**_SHARPNESS) ** (1.0 / _SHARPNESS)


def _total(parts: Parts) -> Column:
    return np.sum(list(parts.values()), axis=0)


def _decode_products(plans: ServingPlans, batch: Column, rates: Rates) -> Column:
    work = plans.work
    params = (work.attention_params + work.dense_params) / plans.tensor + work.whole_params
    bandwidth = plans.bandwidth * rates["weight_share"]
    dense = smooth_max(
        params * plans.dense_bytes / bandwidth,
        2.0 * params * batch / (plans.dense_flops * rates["product_share"]),
    )
    head = smooth_max(
        work.vocab * work.hidden * _HEAD_BYTES / plans.tensor / bandwidth,
        2.0
        * work.vocab
        * work.hidden
        * batch
        / plans.tensor
        / (plans.attention_flops * rates["product_share"]),
    )
    return dense + head + _decode_experts(plans, batch, rates)


def _decode_experts(plans: ServingPlans, batch: Column, rates: Rates) -> Column:
    """Of the busiest device: it reads the experts that the tokens of all replicas choose of its."""
    work = plans.work
    tokens = batch * plans.attention_dp
    touched = touched_experts(work.experts, work.active, tokens * rates["spread"])
    skew = expert_skew(tokens * work.active / plans.expert, plans.expert, rates["skew"])
    share = touched / work.experts / plans.stage_devices
    # a device cannot read more than all of its experts
    share = np.minimum(share * skew, 1.0 / plans.stage_devices)
    bandwidth = plans.bandwidth * rates["weight_share"] * rates["expert_share"]
    products = tokens * work.expert_flops / plans.stage_devices * skew
    return smooth_max(
        work.expert_params * share * plans.expert_bytes / bandwidth,
        products / (plans.expert_flops * rates["product_share"] * rates["expert_share"]),
    )


def expert_skew(choices: Column, devices: Column, strength: Column) -> Column:
    """Load of the busiest of `devices` over the mean, `choices` falling on each on average.

    The largest of so many sums of random choices lies about sqrt(2 ln devices) deviations above
    the mean; `strength` is how much of it published steps show.
    """
    deviations = np.sqrt(2.0 * np.log(np.maximum(devices, 1.0)) / np.maximum(choices, 1e-9))
    return np.minimum(1.0 + strength * deviations, _MAX_SKEW)


def _decode_attention(plans: ServingPlans, batch: Column, context: Column, rates: Rates) -> Column:
    kinds = plans.work.kinds
    read = plans.work.read_per_row(plans.tensor, context) * plans.kv_bytes
    state = (kinds.count * kinds.state).sum(axis=-1) * 2.0 * _STATE_BYTES / plans.tensor
    seen = np.minimum(context[..., None], kinds.limit)
    flops = (kinds.count * seen * kinds.decode_flops).sum(axis=-1) / plans.tensor
    flops = flops + (kinds.count * kinds.index_flops).sum(axis=-1) * context
    return smooth_max(
        batch * (read + state) / (plans.bandwidth * rates["cache_share"]),
        batch * flops / (plans.attention_flops * rates["score_share"]),
    )


def _network(plans: ServingPlans, tokens: Column, rates: Rates) -> Column:
    """All-reduces of a tensor group; gathers and scatters of replicas around experts; stages."""
    work, tensor, stage = plans.work, plans.tensor, plans.stage_devices
    link = np.where(stage <= plans.domain, plans.link, plans.network) * rates["link_share"]
    message = tokens * work.hidden * _ACTIVATION_BYTES
    start = rates["reduce_s"] * (1.0 + np.log2(tensor)) / 2.0
    reduces = np.where(tensor > 1, 2.0 * work.layers - _shared_layers(plans), 0.0)
    time = reduces * (start + 2.0 * message * (tensor - 1.0) / tensor / link)
    shared = 2.0 * _shared_layers(plans)
    both = message * plans.attention_dp * (stage - 1.0) / stage / link
    time = time + shared * (rates["gather_s"] + both)
    hops = (plans.pipeline - 1.0) * (rates["reduce_s"] + message / (plans.link * 0.5))
    return time + hops


def _shared_layers(plans: ServingPlans) -> Column:
    """Layers whose experts serve several attention replicas."""
    return np.where(plans.attention_dp > 1, plans.work.expert_layers, 0.0)


def _layer_starts(work: ServingWork, rates: Rates) -> Column:
    extra = (
        work.expert_layers * rates["expert_layer_s"]
        + work.latent_layers * rates["latent_layer_s"]
        + work.linear_layers * rates["linear_layer_s"]
        + work.index_layers * rates["index_layer_s"]
    )
    return work.layers * rates["layer_s"] + extra


def _causal_pairs(tokens: Column, work: ServingWork) -> Column:
    """Pairs of a prompt's query and the keys before it that it sees, [N, K]."""
    tokens = tokens[..., None]
    limit = np.minimum(work.kinds.limit, tokens)
    return limit * (tokens - limit / 2.0)

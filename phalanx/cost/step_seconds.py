"""Seconds of a training step from measured rates: operators, and what ranks exchange within them.

Symbols as in `cost.training`. Ranks of a context axis share the tokens of every row: each computes
1/c of all operators, attention's pairs too, which its layouts of tokens deal out evenly.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from functools import lru_cache
from math import lcm
from typing import NamedTuple

from phalanx.cost.step_saved import WANTED, is_split_by_token
from phalanx.cost.step_sums import summed_rows
from phalanx.cost.step_work import Workload
from phalanx.models.config import DTYPE_BYTES, DecoderConfig
from phalanx.models.operators import Operator, operators
from phalanx.models.spec import canonical_tensors
from phalanx.policy import Exchange, Rule, Spec

RateKey = str
_REPEATED_BY_SELECTIVE = ("norm", "gate")
_OF_HEADS = ("keys_values", "queries", "heads")


# a decoder has a thousand tensors, and every product asks for the shape of one
_tensors = lru_cache(maxsize=8)(canonical_tensors)


def rate_key(op: Operator, config: DecoderConfig) -> RateKey:
    """Operators with one key cost the same: kind, shape, and whether something is trained in it."""
    key = op.op
    if op.op == "linear":
        shape = _tensors(config)[op.tensors[0]].shape
        key += f".{shape[0]}x{shape[1]}{'.trained' if op.num_trained else ''}"
    elif op.op == "norm":
        rotated = ".rotated" if op.name.endswith(("q_norm", "k_norm")) else ""
        bare = "" if op.tensors else ".bare"
        key += f".{op.out_bytes_per_token:.0f}{rotated}{bare}"
    elif op.op == "attention":
        assert op.layer is not None
        key += f".{config.layer_kinds[op.layer]}"
    elif op.op in ("gate", "rotate", "add", "scale", "embedding"):
        key += f".{op.out_bytes_per_token:.0f}"
    return key


class Priced(NamedTuple):
    """An operator with a rank's seconds of a step: forward, backward, and forward once more where
    the backward pass computes it again."""

    operator: Operator
    forward_s: float
    backward_s: float
    again_s: float

    def weight_s(self, *, trains_all: bool) -> float:
        """Of the backward pass, what only makes gradients of weights: all of an embedding's, half
        of a trained product's; next to nothing of adapters'."""
        if not trains_all:
            return 0.0
        share = {"embedding": 1.0, "linear": 0.5, "head": 0.5}
        return self.backward_s * share.get(self.operator.op, 0.0)


def priced_operators(
    config: DecoderConfig, work: Workload, value: Mapping[RateKey, float], recompute: str = "none"
) -> Iterator[Priced]:
    """The operators of a rank in the order of the forward pass.

    Args:
        config: a rank's sizes (`cost.local_shapes`).
        value: rate key -> seconds per token (per target for the head); bytes per second of "add".

    Sums of the gradients of rows are part of the operator behind which they meet.
    """
    summed_bytes = summed_rows(config, work)
    for op in operators(config, document_tokens=work.document_tokens, lora=work.lora):
        key = rate_key(op, config)
        count = (work.counted if op.op == "head" else work.tokens) / work.context_degree
        if is_split_by_token(op, work):
            count /= work.tensor_degree
        forward_s, backward_s = count * value[f"{key}.F"], count * value[f"{key}.B"]
        backward_s += summed_bytes.get(op.name, 0.0) / value["add"]
        repeated = recompute == "full" or op.op in _REPEATED_BY_SELECTIVE
        is_again = recompute != "none" and op.layer is not None and repeated
        yield Priced(op, forward_s, backward_s, forward_s if is_again else 0.0)


class PricedExchange(NamedTuple):
    """What a module's rules exchange of activations in a step of one rank.

    Attributes:
        kind: "exchange" on a tensor axis, "context" on one that shares rows.
    """

    module: str
    kind: str
    forward_s: float
    backward_s: float


def priced_exchanges(
    config: DecoderConfig,
    work: Workload,
    specs: Sequence[Spec],
    value: Mapping[RateKey, float],
    recompute: str = "none",
) -> Iterator[PricedExchange]:
    """Exchanges along tensor and context axes.

    An all-reduce of rows was measured; all else counts half of one. Overlap is not credited.

    Args:
        config: a rank's sizes (`cost.local_shapes`).
    """
    blocks = [
        f"model.layers.{layer}.{block}"
        for layer in range(config.num_layers)
        for block in ("self_attn", "mlp")
    ]
    degrees = {"tensor": work.tensor_degree, "context": work.context_degree}
    for spec in specs:
        degree = degrees.get(spec.family, 1)
        if degree == 1:
            continue
        kind = "exchange" if spec.family == "tensor" else "context"
        for module in (*blocks, "model.embed_tokens", "lm_head"):
            rule = _rule_of(config, spec, module)
            seconds = dict.fromkeys("FB", 0.0)
            if rule is None:
                continue
            for exchange in rule.exchanges:
                took_s = _exchange_seconds(config, work, module, rule, exchange, degree, value)
                seconds[exchange.phase] += took_s
                if recompute == "full" and exchange.phase == "F" and module in blocks:
                    seconds["B"] += took_s
            if any(seconds.values()):
                yield PricedExchange(module, kind, seconds["F"], seconds["B"])


def _exchange_seconds(
    config: DecoderConfig,
    work: Workload,
    module: str,
    rule: Rule,
    exchange: Exchange,
    degree: int,
    value: Mapping[RateKey, float],
) -> float:
    if exchange.of in ("activations", "inputs"):
        own = work.tokens / work.context_degree
        payload = own * config.hidden_size * DTYPE_BYTES[config.dtype]
        whole = exchange.collective == "all_reduce"
        return payload * (1.0 if whole else 0.5) / value["all_reduce"]
    if exchange.of not in _OF_HEADS or not module.endswith(".self_attn"):
        return 0.0
    layer = int(module.split(".")[2])
    return _head_bytes(config, work, layer, rule, exchange, degree) / 2 / value["all_reduce"]


def _head_bytes(
    config: DecoderConfig,
    work: Workload,
    layer: int,
    rule: Rule,
    exchange: Exchange,
    degree: int,
) -> float:
    """Keys and values, queries, or all of them: of the whole row where they are gathered or summed;
    of a rank's own tokens where heads change places; behind a window of those that others see, at
    most two windows of a row (`policies.context`)."""
    kind, itemsize = config.attention(layer), DTYPE_BYTES[config.dtype]
    own, num_tokens, key_value = work.tokens / work.context_degree, work.tokens, kind.num_kv_heads
    is_sum = exchange.collective == "reduce_scatter"
    if rule.placement == WANTED:
        seen = 2 * ((kind.window or 1) - 1) * work.num_items
        num_tokens, is_sum = min(own, seen), exchange.phase == "B"
    elif exchange.collective == "all_to_all":
        num_tokens, key_value = own, lcm(key_value, degree)
    if is_sum:
        itemsize = DTYPE_BYTES.get(rule.reduce_dtype, max(itemsize, 4))
    count = 0 if exchange.of == "keys_values" else kind.num_heads
    count += 0 if exchange.of == "queries" else 2 * key_value
    return num_tokens * count * kind.head_dim * itemsize


def _rule_of(config: DecoderConfig, spec: Spec, module: str) -> Rule | None:
    """Of a module; attention within a window may have a rule of its own."""
    parts = module.split(".")
    if parts[-1] == "self_attn" and config.attention(int(parts[2])).window is not None:
        rule = spec.rule_for(f"{module}.window")
        if rule is not None and rule.placement == WANTED:
            return rule
    return spec.rule_for(module)

"""Seconds of a training step from measured rates: operators, and what ranks exchange within them.

Symbols as in `cost.training`. Ranks of a context axis share the tokens of every row: each computes
1/c of all operators, attention's pairs too, which its layouts of tokens deal out evenly.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from math import lcm
from typing import NamedTuple

from phalanx.cost.step_saved import is_split_by_token
from phalanx.cost.step_work import Workload
from phalanx.models.config import DTYPE_BYTES, DecoderConfig
from phalanx.models.operators import Operator, operators
from phalanx.models.spec import canonical_tensors
from phalanx.policy import Exchange, Rule, Spec

RateKey = str
_REPEATED_BY_SELECTIVE = ("norm", "gate")
_RING = "ring"  # placement whose exchanges are messages between neighbours


def rate_key(op: Operator, config: DecoderConfig) -> RateKey:
    """Operators with one key cost the same: kind, shape, and whether something is trained in it."""
    key = op.op
    if op.op == "linear":
        shape = canonical_tensors(config)[op.tensors[0]].shape
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
        value: rate key -> seconds per token (per target for the head).
    """
    for op in operators(config, document_tokens=work.document_tokens, lora=work.lora):
        key = rate_key(op, config)
        count = (work.counted if op.op == "head" else work.tokens) / work.context_degree
        if is_split_by_token(op, work):
            count /= work.tensor_degree
        forward_s, backward_s = count * value[f"{key}.F"], count * value[f"{key}.B"]
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

    An all-reduce of rows was measured; a gather or a scatter counts half of one, messages of a ring
    go at the rate of a message. Overlap is not credited.

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
            rule = spec.rule_for(module)
            seconds = dict.fromkeys("FB", 0.0)
            for exchange in rule.exchanges if rule is not None else ():
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
    rule: Rule | None,
    exchange: Exchange,
    degree: int,
    value: Mapping[RateKey, float],
) -> float:
    itemsize, own = DTYPE_BYTES[config.dtype], work.tokens / work.context_degree
    if exchange.of in ("activations", "inputs"):
        payload = own * config.hidden_size * itemsize
        whole = exchange.collective == "all_reduce"
        return payload * (1.0 if whole else 0.5) / value["all_reduce"]
    if exchange.of not in ("keys_values", "queries") or not module.endswith(".self_attn"):
        return 0.0
    kind = config.attention(int(module.split(".")[2]))
    count = 2 * kind.num_kv_heads if exchange.of == "keys_values" else kind.num_heads
    if exchange.collective == "all_to_all":
        count = 2 * lcm(kind.num_kv_heads, degree) if exchange.of == "keys_values" else count
        return own * count * kind.head_dim * itemsize / 2 / value["all_reduce"]
    of_gradients = exchange.of == "keys_values" and exchange.phase == "B"
    wide = of_gradients and exchange.at == "after" and rule is not None and rule.reduce_dtype
    itemsize = DTYPE_BYTES[rule.reduce_dtype] if wide and rule is not None else itemsize
    payload = work.tokens * count * kind.head_dim * itemsize
    if rule is not None and rule.placement == _RING:
        return payload * (degree - 1) / degree / value["p2p"]
    return payload / 2 / value["all_reduce"]

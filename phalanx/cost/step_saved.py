"""What autograd keeps of every token until the backward pass, of parts of a decoder. No torch."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from typing import NamedTuple

from phalanx.cost.step_work import Workload
from phalanx.models.config import DTYPE_BYTES, DecoderConfig
from phalanx.models.operators import Operator, operators
from phalanx.policy import Spec

# products whose input a norm or a gate has made of what is kept anyway (`engines.recompute`)
_MADE_BY_NORM = ("q_proj", "k_proj", "v_proj", "gate_proj", "up_proj")
_MADE_BY_GATE = ("down_proj", "per_layer_projection")
_ATTENTION, _GATHERED = "model.layers.0.self_attn", "all_gather"
WANTED = "wanted"  # placement of attention within a window that asks for what its queries see


class Saved(NamedTuple):
    """What autograd keeps of a token: of a stretch of the model, and while one of its layers is
    computed again, of that one beside it."""

    kept: float
    again: float


def saved_bytes_per_token(config: DecoderConfig, work: Workload, recompute: str) -> float:
    """Of the whole model, at the moment when it is most."""
    return sum(saved_of(config, work, recompute, [lambda op: True])[0])


def saved_of(
    config: DecoderConfig, work: Workload, recompute: str, parts: Sequence[Callable[..., bool]]
) -> list[Saved]:
    """Of parts of the model.

    none: everything; selective: not what norms and gates make; full: the input of each layer only.

    Args:
        parts: whether each has an operator.
    """
    listed = operators(config, document_tokens=work.document_tokens, lora=work.lora)
    listed = [op for op in listed if op.op != "head"]
    return [_saved(config, work, recompute, [op for op in listed if has(op)]) for has in parts]


def _saved(
    config: DecoderConfig, work: Workload, recompute: str, listed: Sequence[Operator]
) -> Saved:
    outside, layers = 0.0, dict.fromkeys((op.layer for op in listed if op.layer is not None), 0.0)
    given_up = dict(layers)
    for op in listed:
        share = 1.0 / work.tensor_degree if is_split_by_token(op, work) else 1.0
        kept = share * op.saved_bytes_per_token + _other_keys(op, config, work)
        if op.layer is None:
            outside += kept
            continue
        layers[op.layer] += kept
        given_up[op.layer] += _made_again(op, config, work)
    if recompute == "none":
        return Saved(outside + sum(layers.values()), 0.0)
    again = max(given_up.values(), default=0.0)
    if recompute == "full":
        row = config.hidden_size * DTYPE_BYTES[config.dtype]
        given_up = {at: max(0.0, kept - row) for at, kept in layers.items()}
        again = max(layers.values(), default=0.0)
    return Saved(outside + sum(layers.values()) - sum(given_up.values()), again)


def keys_kept(specs: Iterable[Spec]) -> tuple[bool, bool]:
    """What the rules of context specs let layers keep of other ranks' keys and values: all of the
    row; of a layer with a window what its queries see (`Workload.gathers_keys`, `windows_seen`).
    What is gathered once is not gathered again; a ring sends its keys around twice."""
    for spec in specs:
        attention = spec.rule_for(_ATTENTION) if spec.family == "context" else None
        if attention is not None:
            gathers = attention.placement == _GATHERED
            window = spec.rule_for(f"{_ATTENTION}.window")
            return gathers, window is not None and window.placement == WANTED
    return False, False


def _other_keys(op: Operator, config: DecoderConfig, work: Workload) -> float:
    """Bytes per token of this rank that attention keeps of the keys and values of others: of all
    others of the row, or of at most two windows of it; of a layer that has none of its own, those
    of its own tokens too, as what was gathered is a copy."""
    if op.op != "attention" or op.layer is None or not op.saved_bytes_per_token:
        return 0.0
    kind, others = config.attention(op.layer), work.context_degree - 1.0
    if work.windows_seen and kind.window is not None:
        own = work.longest_row / work.context_degree
        others = min(others, 2.0 * (kind.window - 1) / own)
    elif not work.gathers_keys:
        return 0.0
    others += config.kv_source(op.layer) != op.layer
    return others * 2.0 * kind.num_kv_heads * kind.head_dim * DTYPE_BYTES[config.dtype]


def is_split_by_token(op: Operator, work: Workload) -> bool:
    """Whether a rank of a tensor axis computes it on its own tokens only (between blocks)."""
    if not work.splits_tokens:
        return False
    per_head = op.name.endswith(("q_norm", "k_norm", "v_norm"))
    return (op.op == "norm" and not per_head) or op.op in ("add", "scale", "embedding")


def _made_again(op: Operator, config: DecoderConfig, work: Workload) -> float:
    """Bytes per token that `selective` does not keep of an operator's inputs."""
    leaf = op.name.rsplit(".", 1)[-1]
    itemsize = DTYPE_BYTES[config.dtype]
    if op.op == "linear" and leaf in (*_MADE_BY_NORM, *_MADE_BY_GATE):
        low = (work.lora_rank if op.num_trained else 0) * itemsize
        return max(0.0, op.saved_bytes_per_token - low)
    if op.op == "attention" and op.saved_bytes_per_token and op.layer is not None:
        kind = config.attention(op.layer)
        heads = kind.num_heads * config.qk_norm
        if config.kv_source(op.layer) == op.layer and not _other_keys(op, config, work):
            heads += kind.num_kv_heads * (config.qk_norm + config.value_norm)
        return float(heads * kind.head_dim * itemsize)
    return 0.0

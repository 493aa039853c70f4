"""Bytes that one rank holds at the peak of a training step. No torch.

Symbols as in `cost.training`.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from fnmatch import fnmatchcase

from phalanx.cost.step_work import Workload
from phalanx.mesh import Mesh
from phalanx.models.config import DTYPE_BYTES, DecoderConfig
from phalanx.models.operators import Operator, operators
from phalanx.models.spec import TensorSpec, canonical_tensors, lora_tensors
from phalanx.policy import Rule, Spec

LOGIT_CHUNK_BYTES = 1 << 27  # ops.loss holds at most so many bytes of logits
# products whose input a norm or a gate has made of what is kept anyway (`engines.recompute`)
_MADE_BY_NORM = ("q_proj", "k_proj", "v_proj", "gate_proj", "up_proj")
_MADE_BY_GATE = ("down_proj", "per_layer_projection")


@dataclass(frozen=True)
class Unit:
    """A unit of the data specs in bytes: stored on a rank, gathered; and trained elements held."""

    rule: Rule | None
    stored: float
    gathered: float
    trained: float
    num_trained: int

    def gathers(self, num_items: float) -> float:
        """Times that it is gathered in a step."""
        if self.rule is None or (not self.rule.reshard and not self.num_trained):
            return 0.0  # whole everywhere, or gathered once and kept
        return 2.0 * num_items if self.rule.reshard else 1.0

    @property
    def reduces_always(self) -> bool:
        """Whether its gradients are scattered after every micro-batch, not only the last."""
        exchanges = self.rule.exchanges if self.rule is not None else ()
        return any(each.of == "grads" and each.when == "always" for each in exchanges)

    @property
    def is_kept(self) -> bool:
        """Whether it stays gathered between its forward and its backward pass."""
        return self.rule is not None and not self.rule.reshard


def shard_spec(specs: Iterable[Spec]) -> Spec | None:
    """The spec that shards parameters, if one does."""
    return next((s for s in specs if s.rules()[-1].placement == "shard"), None)


def units_of(
    config: DecoderConfig, work: Workload, specs: Sequence[Spec], mesh: Mesh, master_bytes: int
) -> list[Unit]:
    """The units of a decoder with a rank's sizes (`cost.local_shapes`)."""
    shard = shard_spec(specs)
    degree = mesh.degree(shard.axis) if shard else 1
    stored = DTYPE_BYTES[config.dtype]
    adapters = list(lora_tensors(config, work.lora).values()) if work.lora else []
    rules = shard.rules() if shard else ()  # made once: a decoder has a thousand tensors
    by_unit: dict[str, list[TensorSpec]] = {}
    for spec in (*canonical_tensors(config).values(), *adapters):
        by_unit.setdefault(_unit_name(spec.name, rules), []).append(spec)
    units = []
    for tensors in by_unit.values():
        held, gathered, trained, num_trained = 0.0, 0.0, 0.0, 0
        for spec in tensors:
            share = -(-spec.shape[0] // degree) / spec.shape[0]  # of dim 0, padded
            is_trained = spec.is_trained and (work.lora is None or ".lora_" in spec.name)
            held += spec.num_elements * share * (master_bytes if is_trained else stored)
            gathered += spec.num_elements * share * degree * stored if shard else 0.0
            trained += spec.num_elements * share * is_trained
            num_trained += spec.num_elements * is_trained
        rule = _rule_for(tensors[0].name.removesuffix(".weight"), rules)
        units.append(Unit(rule, held, gathered, trained, num_trained))
    return units


def _unit_name(tensor: str, rules: Sequence[Rule]) -> str:
    """The unit that claims a tensor: its layer, the root (""), or modules taken out by a rule."""
    parts = tensor.split(".")
    layer = ".".join(parts[:3]) if parts[1] == "layers" else ""
    rule = _rule_for(tensor.removesuffix(".weight"), rules)
    if rule is None or rule in (_rule_for(layer, rules), _rule_for("", rules)):
        return layer
    return rule.pattern


def _rule_for(module: str, rules: Sequence[Rule]) -> Rule | None:
    """As `Spec.rule_for`."""
    return next((rule for rule in rules if fnmatchcase(module, rule.pattern)), None)


def memory_terms(
    config: DecoderConfig,
    work: Workload,
    units: Sequence[Unit],
    *,
    reduce_bytes: int = 4,
    recompute: str = "none",
    saved_per_token: float | None = None,
) -> dict[str, float]:
    """Name -> bytes of the tensors of one rank at the peak.

    Args:
        saved_per_token: `saved_bytes_per_token`, where the caller has it for many rows.
    """
    if saved_per_token is None:
        saved_per_token = saved_bytes_per_token(config, work, recompute)
    itemsize = DTYPE_BYTES[config.dtype]
    in_turn = [u for u in units if u.rule is not None and u.rule.reshard]
    waiting = 1 + max((u.rule.prefetch for u in in_turn if u.rule), default=0)
    regathered = [u.gathered for u in units if u.gathers(1.0)]
    return {
        "weights": sum(u.stored for u in units),
        "gathered": sum(u.gathered for u in units if u.is_kept)
        + waiting * max((u.gathered for u in in_turn), default=0.0),
        "gather buffer": max(regathered, default=0.0),
        "gradients": _gradient_bytes(units, work, itemsize, reduce_bytes),
        "optimizer": 8.0 * sum(u.trained for u in units),
        "activations": work.longest_row * saved_per_token,
        "logits": float(
            min(LOGIT_CHUNK_BYTES, work.row_counted * config.vocab_size * itemsize)
            + 2 * work.row_counted * config.hidden_size * (itemsize + 4)
        ),
    }


def _gradient_bytes(
    units: Sequence[Unit], work: Workload, itemsize: int, reduce_bytes: int
) -> float:
    """What a rank keeps reduced, and the whole gradients beside it.

    A sharded unit scatters its gradient as soon as it is there, so one at a time is whole; where
    micro-batches come before the one that reduces, all of them are, and so they are without shards.
    """
    accumulating = reduce_bytes if work.num_items > 1 else 0
    whole = in_turn = 0.0
    for unit in units:
        if unit.rule is not None and (unit.reduces_always or not accumulating):
            in_turn = max(in_turn, unit.num_trained * float(itemsize + reduce_bytes))
        else:
            whole += unit.num_trained * (itemsize + accumulating)
    return whole + in_turn + reduce_bytes * sum(unit.trained for unit in units)


def saved_bytes_per_token(config: DecoderConfig, work: Workload, recompute: str) -> float:
    """What autograd keeps of a token, and while a layer is computed again, of that layer.

    none: everything; selective: not what norms and gates make; full: the input of each layer only.
    """
    listed = operators(config, document_tokens=work.document_tokens, lora=work.lora)
    outside, layers = 0.0, [0.0] * config.num_layers
    given_up = [0.0] * config.num_layers
    for op in (op for op in listed if op.op != "head"):
        share = 1.0 / work.tensor_degree if is_split_by_token(op, work) else 1.0
        kept = share * op.saved_bytes_per_token
        if op.layer is None:
            outside += kept
            continue
        layers[op.layer] += kept
        given_up[op.layer] += _made_again(op, config, work)
    if recompute == "none":
        return outside + sum(layers)
    again = max(given_up)
    if recompute == "full":
        row = config.hidden_size * DTYPE_BYTES[config.dtype]
        given_up = [max(0.0, kept - row) for kept in layers]
        again = max(layers)
    return outside + sum(layers) - sum(given_up) + again


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
        if config.kv_source(op.layer) == op.layer:
            heads += kind.num_kv_heads * (config.qk_norm + config.value_norm)
        return float(heads * kind.head_dim * itemsize)
    return 0.0

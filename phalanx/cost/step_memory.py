"""Bytes that one rank holds at the peak of a training step. No torch.

Symbols as in `cost.training`; psi_head elements of a trained head. Weights and optimizer state are
always there; beside them, the most of these moments of a step whose last backward pass reduces:

    first        the gather buffer of the largest unit, beside what is gathered into
    loss         activations (among them adapters in their dtype), logits, gradients that wait,
                 2 K psi_head (the head's gradient and its product; 4 + K instead of 2 K where
                 chunks of rows are added up in float32)
    first layer  activations, units gathered in turn, K psi_head, gradients that wait, a layer's
    last layer   the same with what the other layers have reduced, without activations
    sum          gradients of the root; twice K psi_head where its head is the embedding
    reduce       the root given back; its gradient and the copy that is reduced: (K + G) psi
                 (2 G psi where it waited)

Gradients that wait for the last micro-batch: G psi where ranks exchange them, else K psi (K = 4 of
adapters that are kept in float32 and not gathered). Reduced ones: G psi / F of a sharded unit,
G psi of one that replicas sum, K psi otherwise.
Where only the update of whole weights is cut (ZeRO 1 and 2), a rank ends with G psi / F and has
8 / F of optimizer state, and M / F of masters beside weights in another dtype.

Source: torch/distributed/fsdp/_fully_shard of PyTorch 2.13 (`post_backward`, `foreach_reduce`:
gradients in the reduction's dtype wait, one copy is reduced at a time), `engines.unit_sum`,
`ops.loss`; when a tied matrix's gradients are added: torch/csrc/autograd/input_buffer.cpp.
Differences and limits: blocks of 2 MiB and more go back to the system when they are freed
(`engines.memory.return_large_blocks`), what smaller ones leave behind after every micro-batch
(`return_free_memory`). Holes in the heap within a micro-batch are not counted: where matrices are
smaller than that (38 MB of float32 weights in six layers, two replicas), gradients that a reduction
has copied and activations that are gone stayed until its end, 100 MB more than 523 MB on two ranks.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, replace
from fnmatch import fnmatchcase
from math import ceil, prod

from phalanx.cost.step_saved import saved_bytes_per_token
from phalanx.cost.step_work import Workload
from phalanx.mesh import Mesh
from phalanx.models.config import DTYPE_BYTES, DecoderConfig
from phalanx.models.spec import TensorSpec, canonical_tensors, lora_tensors
from phalanx.policy import Rule, Spec

OFFLOAD_PIECE_BYTES = 1 << 26  # engines.offload maps so much at a time
_OFTEN = ("always", "round")
LOGIT_CHUNK_BYTES = 1 << 27  # ops.loss holds at most so many bytes of logits


@dataclass(frozen=True)
class Unit:
    """A unit of the data specs in bytes: stored on a rank, gathered; and trained elements held.

    `is_root`: it holds what no other unit claims; `is_summed`: replicas add its gradients up;
    `update`: the rule that cuts the update of whole weights over ranks, `updated` the elements that
    this rank updates; `grad_itemsize`: K of its gradients.
    """

    rule: Rule | None
    stored: float
    gathered: float
    trained: float
    num_trained: int
    is_root: bool = False
    is_summed: bool = False
    update: Rule | None = None
    updated: float = 0.0
    grad_itemsize: int = 4

    @property
    def is_cut(self) -> bool:
        """Whether a rank ends with a part of its gradients."""
        return self.rule is not None or self.update is not None

    def gathers(self, num_items: float) -> float:
        """Times that it is gathered in a step."""
        if self.rule is None or (not self.rule.reshard and not self.num_trained):
            return 0.0  # whole everywhere, or gathered once and kept
        return 2.0 * num_items if self.rule.reshard else 1.0

    @property
    def reduces_always(self) -> bool:
        """Whether its gradients are scattered before the last micro-batch too: after every one, or
        every round of a pipeline."""
        rule = self.rule or self.update
        exchanges = rule.exchanges if rule is not None else ()
        return any(each.of == "grads" and each.when in _OFTEN for each in exchanges)

    @property
    def is_kept(self) -> bool:
        """Whether it stays gathered between its forward and its backward pass."""
        return self.rule is not None and not self.rule.reshard


def shard_spec(specs: Iterable[Spec]) -> Spec | None:
    """The spec that shards parameters, if one does."""
    return _placed(specs, "shard")


def update_spec(specs: Iterable[Spec]) -> Spec | None:
    """The spec that shards the update of whole parameters, if one does."""
    return _placed(specs, "update")


def _placed(specs: Iterable[Spec], placement: str) -> Spec | None:
    return next((s for s in specs if s.rules()[-1].placement == placement), None)


def cut_degree(spec: Spec | None, mesh: Mesh, work: Workload) -> int:
    """Ranks that share what a spec cuts: those of its axis, and of a context axis with it."""
    return mesh.degree(spec.axis) * work.context_degree if spec is not None else 1


def units_of(
    config: DecoderConfig,
    work: Workload,
    specs: Sequence[Spec],
    mesh: Mesh,
    master_bytes: int,
    holds: Callable[[str], bool] = lambda tensor: True,
) -> list[Unit]:
    """The units of a decoder with a rank's sizes (`cost.local_shapes`).

    Args:
        holds: whether the rank holds a tensor (`cost.pipeline_parts`).
    """
    shard, update = shard_spec(specs), update_spec(specs)
    degree, parts = cut_degree(shard, mesh, work), cut_degree(update, mesh, work)
    stored = DTYPE_BYTES[config.dtype]
    named = canonical_tensors(config)
    adapters = list(lora_tensors(config, work.lora).values()) if work.lora else []
    rules = shard.rules() if shard else ()  # made once: a decoder has a thousand tensors
    by_unit: dict[str, list[TensorSpec]] = {}
    for spec in filter(lambda each: holds(each.name), (*named.values(), *adapters)):
        by_unit.setdefault(_unit_name(spec.name, rules), []).append(spec)
    copies = work.context_degree * prod(mesh.degree(each.axis) for each in specs)
    is_summed = shard is None and update is None and copies > 1
    units = []
    for name, tensors in by_unit.items():
        held, gathered, trained, updated, num_trained = 0.0, 0.0, 0.0, 0.0, 0
        for spec in tensors:
            share = -(-spec.shape[0] // degree) / spec.shape[0]  # of dim 0, padded
            own = share * -(-spec.shape[0] // parts) / spec.shape[0]
            is_trained = spec.is_trained and (work.lora is None or ".lora_" in spec.name)
            if is_trained and update is not None:
                masters = master_bytes * own if master_bytes != stored else 0.0
                held += spec.num_elements * (stored + masters)
            else:
                held += spec.num_elements * share * (master_bytes if is_trained else stored)
            gathered += spec.num_elements * share * degree * stored if shard else 0.0
            trained += spec.num_elements * share * is_trained
            updated += spec.num_elements * own * is_trained
            num_trained += spec.num_elements * is_trained
        rule = _rule_for(tensors[0].name.removesuffix(".weight"), rules)
        unit = Unit(rule, held, gathered, trained, num_trained, not name, is_summed)
        cut = update.rule_for(name) if update is not None else None
        own = master_bytes if work.lora is not None and shard is None else stored
        units.append(replace(unit, update=cut, updated=updated, grad_itemsize=own))
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
    has_head: bool = True,
    offloads: bool = False,
) -> dict[str, float]:
    """Name -> bytes of the tensors of one rank at the peak.

    Args:
        saved_per_token: what is kept of every token of a row, where it is more or less than
            `saved_bytes_per_token`: a pipeline's rank keeps its stages' share of several rows.
        has_head: whether the rank computes the loss.
        offloads: moments wait elsewhere, and are here a piece at a time.
    """
    if saved_per_token is None:
        saved_per_token = saved_bytes_per_token(config, work, recompute)
    head_rows = has_head * work.row_counted / work.context_degree
    itemsize = DTYPE_BYTES[config.dtype]
    moments_bytes = 8.0 * sum(u.updated for u in units)
    always = {
        "weights": sum(u.stored for u in units),
        "optimizer": min(moments_bytes, OFFLOAD_PIECE_BYTES) if offloads else moments_bytes,
    }
    gathered = _gathered_bytes(units)
    gradients = _gradient_bytes(config, work, units, head_rows, reduce_bytes)
    activations = work.longest_row / work.context_degree * saved_per_token
    rows = 2.0 * head_rows * config.hidden_size * (itemsize + 4)
    chunk = max(_logit_bytes(config, count) for count in _counts(work)) if has_head else 0.0
    activations += _cast_bytes(units, itemsize)
    alive = {
        "loss": {"activations": activations, "logits": chunk + rows},
        "first layer": {"activations": activations, "logits": rows},
    }
    empty = dict.fromkeys(("gathered", "gather buffer", "gradients", "activations", "logits"), 0.0)
    moments = (
        always | empty | gathered[name] | {"gradients": gradients[name]} | alive.get(name, {})
        for name in gradients
    )
    return max(moments, key=lambda terms: sum(terms.values()))


def _counts(work: Workload) -> list[float]:
    """Targets of a rank's rows, of all that occur."""
    return [count / work.context_degree for count in work.target_counts or (work.row_counted,)]


def _logit_bytes(config: DecoderConfig, count: float) -> float:
    """Of a chunk of the loss: they are equal, and none is above the limit."""
    row_bytes = config.vocab_size * DTYPE_BYTES[config.dtype]
    most = max(1, LOGIT_CHUNK_BYTES // row_bytes)
    return float(row_bytes * count / max(1, ceil(count / most)))


def _cast_bytes(units: Sequence[Unit], itemsize: int) -> float:
    """Adapters in the dtype of the activations, which every product keeps for its backward pass,
    where they are stored in a wider one."""
    return itemsize * sum(u.trained for u in units if u.grad_itemsize > itemsize)


def _gathered_bytes(units: Sequence[Unit]) -> dict[str, dict[str, float]]:
    """Moment -> gathered weights, and the buffers that they are received in."""
    in_turn = [u for u in units if u.rule is not None and u.rule.reshard]
    waiting = 1 + max((u.rule.prefetch for u in in_turn if u.rule), default=0)
    largest = max((u.gathered for u in in_turn), default=0.0)
    kept = sum(u.gathered for u in units if u.is_kept)
    frozen = sum(u.gathered for u in units if u.is_kept and not u.num_trained)
    root = sum(u.gathered for u in units if u.is_root and u.is_kept and u.num_trained)
    buffer = max((u.gathered for u in units if u.gathers(1.0)), default=0.0)
    layers = {"gathered": kept + waiting * largest, "gather buffer": largest}
    return {
        "first": {"gathered": kept + largest, "gather buffer": buffer},
        "loss": {"gathered": kept},
        "first layer": layers,
        "last layer": {"gathered": frozen + root + largest},
        "sum": {"gathered": frozen + root},
        "reduce": {"gathered": frozen},
    }


def _gradient_bytes(
    config: DecoderConfig,
    work: Workload,
    units: Sequence[Unit],
    head_rows: float,
    reduce_bytes: int,
) -> dict[str, float]:
    """Moment -> gradients, whole and reduced, and what the loss makes of the head's."""
    accumulates, itemsize = work.num_items > 1, DTYPE_BYTES[config.dtype]
    root = [u for u in units if u.is_root]
    layers = [u for u in units if not u.is_root]
    named = canonical_tensors(config)
    head = named["model.embed_tokens.weight" if config.tied_head else "lm_head.weight"]
    num_head = head.num_elements if head_rows and not work.lora else 0

    def waits(unit: Unit) -> float:
        if not accumulates or unit.reduces_always:
            return 0.0
        wide = reduce_bytes if unit.is_cut or unit.is_summed else 0
        return float(unit.num_trained * max(unit.grad_itemsize, wide))

    def before(unit: Unit) -> float:
        is_there = accumulates and unit.reduces_always
        return waits(unit) + is_there * reduce_bytes * unit.updated

    def reduced(unit: Unit) -> float:
        if unit.is_cut:
            return reduce_bytes * unit.updated
        return float(unit.num_trained * (reduce_bytes if unit.is_summed else unit.grad_itemsize))

    def reducing(unit: Unit) -> float:
        """A unit's own, whole and in the copy that is reduced."""
        whole = waits(unit) or float(unit.num_trained * unit.grad_itemsize)
        is_copied = unit.is_cut or unit.is_summed
        scattered = reduce_bytes * unit.updated if unit.is_cut else 0.0
        return whole + is_copied * reduce_bytes * unit.num_trained + scattered

    waiting, of_head = sum(map(before, units)), itemsize * num_head
    in_chunks = max(_counts(work)) * config.vocab_size * itemsize > LOGIT_CHUNK_BYTES
    at_loss = (4 + itemsize if in_chunks and itemsize < 4 else 2 * itemsize) * num_head
    done = sum(map(reduced, layers))
    first = max((reducing(u) - before(u) for u in layers), default=0.0)
    last = max((reducing(u) - reduced(u) for u in layers), default=0.0)
    arriving = sum(u.grad_itemsize * u.num_trained for u in root) + of_head * config.tied_head
    return {
        "first": sum(before(u) for u in units if u.reduces_always),
        "loss": waiting + at_loss,
        "first layer": waiting + of_head + first,
        "last layer": sum(map(before, root)) + of_head + done + last,
        "sum": sum(map(before, root)) + arriving + done,
        "reduce": done + sum(map(reducing, root)),
    }

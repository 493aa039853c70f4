"""A job's training step in numbers."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from math import ceil

from phalanx.errors import JobError
from phalanx.job import Job
from phalanx.mesh import Mesh
from phalanx.models.config import DTYPE_BYTES, DecoderConfig
from phalanx.models.operators import Operator, operators
from phalanx.models.spec import LoraSpec, canonical_tensors
from phalanx.workload import Block, Heads, Module, StepWork, Unit, toy_work

_DATA_AXES = ("replicate", "shard")
_LONGEST_ROW = 4096
_FED = ("mlp", "feedforward", "per_layer", "layer_scalar", "experts", "router")


def work_of(job: Job, mesh: Mesh, config: DecoderConfig | None) -> StepWork:
    """One optimizer step of one data-parallel rank.

    Args:
        job: `train.item_tokens` gives the micro-batches; without it they are packed rows of
            `row_tokens` tokens, as many as the global batch asks of each data-parallel rank.
        mesh: the axes "replicate" and "shard" split the batch.
        config: the model's sizes; None for 'toy'.

    Raises:
        JobError: `job/bad-value` when the global batch is smaller than one row per rank.
    """
    items = job.train.item_tokens or _item_tokens(job, mesh, row_tokens(job, config))
    if config is None:
        return toy_work(job.model.layers, items, job.model.width)
    lora = None
    if job.train.method == "lora":
        lora = LoraSpec(rank=job.train.lora_rank, alpha=job.train.lora_alpha)
    return model_work(config, items, lora=lora)


def row_tokens(job: Job, config: DecoderConfig | None) -> int:
    """Tokens of a packed row where the data is not looked at: as `[plan]` says, else the longest
    row that the job allows, else the model's context, at most 4,096."""
    context = config.max_positions if config is not None else _LONGEST_ROW
    return job.plan.row_tokens or job.data.max_tokens or min(context, _LONGEST_ROW)


def _item_tokens(job: Job, mesh: Mesh, row_tokens: int) -> tuple[int, ...]:
    ranks = 1
    for axis in _DATA_AXES:
        ranks *= mesh.degree(axis)
    per_rank = job.train.global_batch_tokens / ranks
    if per_rank < 1:
        rule = f"{ranks} data-parallel ranks need at least one token each"
        raise JobError(
            "job/bad-value", "train.global_batch_tokens", job.train.global_batch_tokens, rule,
            legal=[ranks * row_tokens],
        )  # fmt: skip
    count = ceil(per_rank / row_tokens)
    return (round(per_rank / count),) * count


def model_work(
    config: DecoderConfig, item_tokens: Sequence[int], *, lora: LoraSpec | None = None
) -> StepWork:
    """Units and blocks of a decoder, summed from its operators: embedding, layers, norm and head.

    Args:
        config: sizes; its dtype is that of weights and activations.
        item_tokens: tokens of each micro-batch; the longest counts as one document.
        lora: adapters on a frozen base; None: every weight is trained. Adapters are gathered with
            their unit but not counted among its parameters.
    """
    by_block: dict[str, list[Operator]] = {}
    for op in operators(config, document_tokens=max(item_tokens), lora=lora):
        if op.op != "rope":  # tables that all layers share; their bytes are negligible
            by_block.setdefault(block_of(op), []).append(op)
    width = float(config.hidden_size * DTYPE_BYTES[config.dtype])
    shapes = {name: spec.shape for name, spec in canonical_tensors(config).items()}
    by_unit: dict[str, list[str]] = {}
    for name in by_block:
        by_unit.setdefault(name.rsplit(".", 1)[0] if "layers" in name else name, []).append(name)
    units = tuple(
        Unit(
            name=unit,
            blocks=tuple(
                replace(
                    _block(name, by_block[name], shapes, width),
                    heads=_heads(config, by_block[name]),
                )
                for name in names
            ),
            trainable_params=None
            if lora is None
            else sum(op.num_trained for name in names for op in by_block[name]),
        )
        for unit, names in by_unit.items()
    )
    itemsize = DTYPE_BYTES[config.dtype]
    return StepWork(units=units, item_tokens=tuple(item_tokens), param_bytes=itemsize, grad_bytes=4)


def block_of(op: Operator) -> str:
    """The block that an operator belongs to: norms and sums go with what stands between them."""
    if op.layer is None:
        if op.op == "head":
            return "model.norm"
        return "model.embed_tokens" if "per_layer" in op.name else op.name
    feeds = any(word in op.name for word in _FED)
    return f"model.layers.{op.layer}.{'mlp' if feeds else 'self_attn'}"


def _block(
    name: str, inside: Sequence[Operator], shapes: Mapping[str, tuple[int, ...]], width: float
) -> Block:
    kind = {"self_attn": "attention", "mlp": "mlp", "norm": "head", "embed_tokens": "embedding"}
    owned = [tensor for op in inside if op.num_params for tensor in op.tensors]
    modules = [
        Module(tensor.removesuffix(".weight").rsplit(".", 1)[-1], shapes[tensor])
        for tensor in owned
    ]
    if any(op.op == "head" for op in inside) and all(each.name != "lm_head" for each in modules):
        modules.append(Module("lm_head", (0,)))  # tied: split by the same rules, with no weight
    return Block(
        name=name,
        op=kind[name.rsplit(".", 1)[-1]],
        modules=tuple(modules),
        flops_per_token=sum(op.flops_per_token for op in inside),
        backward_flops_per_token=sum(op.backward_flops_per_token for op in inside),
        saved_bytes_per_token=sum(op.saved_bytes_per_token for op in inside),
        out_bytes_per_token=width,
    )


def _heads(config: DecoderConfig, inside: Sequence[Operator]) -> Heads | None:
    """Of an attention block, that of its layer kind."""
    layer = inside[0].layer
    if layer is None or not block_of(inside[0]).endswith(".self_attn"):
        return None
    kind = config.attention(layer)
    head_bytes = float(kind.head_dim * DTYPE_BYTES[config.dtype])
    return Heads(kind.num_heads, kind.num_kv_heads, head_bytes, kind.window)

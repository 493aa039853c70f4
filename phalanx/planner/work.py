"""A job's training step in numbers."""

from __future__ import annotations

from collections.abc import Sequence
from math import ceil

from phalanx.errors import JobError
from phalanx.job import Job
from phalanx.mesh import Mesh
from phalanx.models.config import DTYPE_BYTES, AttentionKind, DecoderConfig
from phalanx.models.spec import LoraSpec, layer_tensors, lora_targets
from phalanx.workload import Block, Module, StepWork, Unit, toy_work

_DATA_AXES = ("replicate", "shard")


def work_of(job: Job, mesh: Mesh, config: DecoderConfig | None) -> StepWork:
    """One optimizer step of one data-parallel rank.

    Args:
        job: `train.item_tokens` gives the micro-batches; without it they are packed rows of
            `data.max_tokens`, as many as the global batch asks of each data-parallel rank.
        mesh: the axes "replicate" and "shard" split the batch.
        config: the model's sizes; None for 'toy'.

    Raises:
        JobError: `job/bad-value` when the global batch is smaller than one row per rank.
    """
    items = job.train.item_tokens or _item_tokens(job, mesh)
    if config is None:
        return toy_work(job.model.layers, items, job.model.width)
    lora = None
    if job.train.method == "lora":
        lora = LoraSpec(rank=job.train.lora_rank, alpha=job.train.lora_alpha)
    return model_work(config, items, lora=lora)


def _item_tokens(job: Job, mesh: Mesh) -> tuple[int, ...]:
    ranks = 1
    for axis in _DATA_AXES:
        ranks *= mesh.degree(axis)
    per_rank = job.train.global_batch_tokens / ranks
    if per_rank < 1:
        rule = f"{ranks} data-parallel ranks need at least one token each"
        raise JobError(
            "job/bad-value", "train.global_batch_tokens", job.train.global_batch_tokens, rule,
            legal=[ranks * job.data.max_tokens],
        )  # fmt: skip
    count = ceil(per_rank / job.data.max_tokens)
    return (round(per_rank / count),) * count


def model_work(
    config: DecoderConfig, item_tokens: Sequence[int], *, lora: LoraSpec | None = None
) -> StepWork:
    """Units and blocks of a decoder: embedding, layers, final norm with the tied head.

    FLOPs are 2 per parameter and token, plus 4 H C per token and visible key for attention; the
    mean number of visible keys of a packed row of n tokens is (n + 1) / 2 without a window.
    Saved activations: the input of every product and norm, in the model's dtype (attention keeps
    no S x S matrix).
    """
    itemsize = DTYPE_BYTES[config.dtype]
    length = max(item_tokens)
    trained = _trained_params(config, lora)
    width = float(config.hidden_size * itemsize)
    table = Module("embed_tokens", (config.vocab_size, config.hidden_size))
    embedding = Block(
        name="model.embed_tokens", op="embedding", modules=(table,), out_bytes_per_token=width
    )
    norm = Module("norm", (config.hidden_size,))
    head = Block(
        name="model.norm",
        op="head",
        modules=(norm,),
        flops_per_token=2.0 * table.num_params,
        saved_bytes_per_token=width,
        out_bytes_per_token=width,
    )
    frozen = 0 if lora else None
    units = [
        Unit(name="model.embed_tokens", blocks=(embedding,), trainable_params=frozen),
        *(_layer(config, at, length, trained) for at in range(config.num_layers)),
        Unit(name="model.norm", blocks=(head,), trainable_params=frozen),
    ]
    return StepWork(
        units=tuple(units), item_tokens=tuple(item_tokens), param_bytes=itemsize, grad_bytes=4
    )


def _trained_params(config: DecoderConfig, lora: LoraSpec | None) -> dict[int, int] | None:
    if lora is None:
        return None
    trained = dict.fromkeys(range(config.num_layers), 0)
    for spec in lora_targets(config, lora):
        trained[int(spec.name.split(".")[2])] += lora.rank * sum(spec.shape)
    return trained


def _layer(config: DecoderConfig, layer: int, length: int, trained: dict[int, int] | None) -> Unit:
    itemsize, d = DTYPE_BYTES[config.dtype], config.hidden_size
    kind = config.attention(layer)
    prefix = f"model.layers.{layer}."
    by_block: dict[str, list[Module]] = {"self_attn": [], "mlp": []}
    for spec in layer_tensors(config, layer):
        name = spec.name.removeprefix(prefix).removesuffix(".weight")
        block = "mlp" if "mlp" in name or "feedforward" in name else "self_attn"
        by_block[block].append(Module(name.rsplit(".", 1)[-1], spec.shape))
    heads = kind.head_dim * (kind.num_heads + kind.num_kv_heads)
    attention = Block(
        name=f"{prefix}self_attn",
        op="attention",
        modules=tuple(by_block["self_attn"]),
        flops_per_token=_matmul_flops(by_block["self_attn"]) + _score_flops(kind, length),
        saved_bytes_per_token=float(itemsize * (3 * d + 4 * heads)),
        out_bytes_per_token=float(itemsize * d),
    )
    mlp = Block(
        name=f"{prefix}mlp",
        op="mlp",
        modules=tuple(by_block["mlp"]),
        flops_per_token=_matmul_flops(by_block["mlp"]),
        saved_bytes_per_token=float(itemsize * (3 * d + 4 * config.intermediate_size)),
        out_bytes_per_token=float(itemsize * d),
    )
    params = None if trained is None else trained[layer]
    return Unit(name=prefix.rstrip("."), blocks=(attention, mlp), trainable_params=params)


def _matmul_flops(modules: Sequence[Module]) -> float:
    return 2.0 * sum(module.num_params for module in modules if len(module.shape) == 2)


def _score_flops(kind: AttentionKind, length: int) -> float:
    window = min(kind.window or length, length)
    visible = window - window * (window - 1) / (2 * length)
    return 4.0 * kind.num_heads * kind.head_dim * visible

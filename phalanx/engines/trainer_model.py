"""The model of a training process: built on the meta device, bound, then filled slice by slice."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace

import torch
from torch import Tensor, nn
from torch.distributed import DeviceMesh

from phalanx.data.batches import MicroBatch
from phalanx.engines.bind import BoundData, bind_data, stored_dtype
from phalanx.engines.bind_context import BoundContext, bind_context
from phalanx.engines.bind_tensor import BoundTensor
from phalanx.engines.process import Process
from phalanx.engines.recompute import apply_recompute
from phalanx.engines.stages import BoundStages, bind_stages
from phalanx.engines.tensor_decoder import bind_decoder
from phalanx.engines.tensor_products import held
from phalanx.engines.whole_weights import whole_weights
from phalanx.errors import PlanError
from phalanx.job import Job
from phalanx.models.adapter_folder import adapter_weights, lora_of
from phalanx.models.cache import KvCache
from phalanx.models.decoder import Decoder
from phalanx.models.decoder_layers import Attend
from phalanx.models.lora import inject, lora_values
from phalanx.models.parameters import initial_values, load_parameters, load_sharded
from phalanx.models.source import ModelSource
from phalanx.models.spec import DecoderConfig, LoraSpec, canonical_tensors
from phalanx.ops.loss import counted_cross_entropy
from phalanx.ops.tensor_exchange import join_tokens
from phalanx.ops.vocabulary import VocabularyPart
from phalanx.plan import RoleProgram
from phalanx.policy import Spec


@dataclass(frozen=True)
class TrainModel:
    """A decoder that is bound to the role's mesh.

    Attributes:
        decoder: with adapters where the method is lora.
        data: how its gradients are summed over data axes.
        tensor: how its products are split.
        lora: of the adapters; None: all parameters are trained.
        stages: which stages of a pipeline this rank holds; None: the whole model.
        context: how ranks share the tokens of a row; None: a rank computes all of them.
        compute_dtype: of activations, as torch prints it; master_dtype: of what is updated.
        label_smoothing: of the loss in training; evaluation takes the targets as they are.
    """

    decoder: Decoder
    data: BoundData
    tensor: BoundTensor
    lora: LoraSpec | None
    stages: BoundStages | None = None
    context: BoundContext | None = None
    compute_dtype: str = "float32"
    master_dtype: str = "float32"
    label_smoothing: float = 0.0

    @property
    def counts_loss(self) -> bool:
        """Whether this rank's loss counts: that of the last stage, and of the first rank on the
        model axis. Ranks that share a row's tokens each have the loss of theirs."""
        return self.tensor.rank == 0 and (self.stages is None or self.stages.holds_last)

    @property
    def row_multiple(self) -> int:
        """Rows must be a multiple of so many tokens."""
        multiple = self.tensor.degree if self.tensor.splits_tokens else 1
        return multiple if self.context is None else multiple * self.context.row_multiple

    def own_tokens(self, row: MicroBatch) -> MicroBatch:
        """What this rank computes of a row."""
        return row if self.context is None else self.context.cut(row)

    def attend(self, row: MicroBatch) -> Attend | None:
        """Attention of these tokens to all of the row; None: a rank has all of it."""
        return None if self.context is None else self.context.attend(row)

    def loss(
        self,
        hidden_SD: Tensor,
        counted_N: Tensor,
        targets_N: Tensor,
        num_counted_global: int | Tensor,
    ) -> Tensor:
        """Sum of -log p(target) over the counted rows, over the global number of them; in training
        mode with smoothed targets.

        Equal on all ranks of the model axis. Arguments as in `ops.loss.counted_cross_entropy`;
        `hidden_SD` is what the decoder returned on this rank.
        """
        return counted_cross_entropy(
            self.whole_rows(hidden_SD),
            held(self.decoder.head_weight),
            counted_N,
            targets_N,
            num_counted_global=num_counted_global,
            soft_cap=self.decoder.config.logit_soft_cap,
            part=self._vocabulary,
            label_smoothing=self.label_smoothing if self.decoder.training else 0.0,
        )

    @property
    def _vocabulary(self) -> VocabularyPart | None:
        """The tokens whose logits this rank computes; None: all."""
        parts = self.tensor.vocabularies
        return parts.get("lm_head", parts.get("model.embed_tokens"))

    def whole_rows(self, hidden_SD: Tensor) -> Tensor:
        """Hidden states of all tokens of the row, where the decoder returned this rank's.

        What follows must be computed equally by all ranks of the model axis (`loss`, `logits`).
        """
        if not self.tensor.splits_tokens:
            return hidden_SD
        return join_tokens(hidden_SD, self.tensor.group)

    def logits(self, hidden_ND: Tensor) -> Tensor:
        """Logits [N, V] over the whole vocabulary, soft cap applied, with gradient.

        Args:
            hidden_ND: rows of `whole_rows`.
        """
        if self._vocabulary is None:
            return self.decoder.logits(hidden_ND)
        logits_NV = self._vocabulary.logits(hidden_ND, held(self.decoder.head_weight))
        cap = self.decoder.config.logit_soft_cap
        return logits_NV if cap is None else cap * torch.tanh(logits_NV / cap)

    def cache(self, capacity: int) -> KvCache:
        """An empty cache for the key and value heads that this rank computes."""
        device = next(self.decoder.parameters()).device
        return KvCache(self.decoder.config, capacity=capacity, device=device)

    @contextmanager
    def sampling(self) -> Iterator[None]:
        """For many small forward passes without gradient: units stay gathered, tokens whole."""
        with self.data.gathered(), self.tensor.whole_tokens():
            yield

    def finish_step(self) -> None:
        """Wait until all gradients are summed: over data axes, the model axis, tied stages."""
        self.data.finish_step()
        self.tensor.finish_step(self.data.held)
        if self.stages is not None:
            self.stages.finish_step(self.decoder, self.data)

    def whole_trainable(self) -> Iterator[tuple[str, Tensor]]:
        """(canonical name, whole tensor on the CPU) of what was trained; all ranks call it.

        Rank 0 gets all of them; elsewhere those of other stages are left out.
        """
        return whole_weights(self.decoder, None if self.stages is None else self.stages.group)


def build_model(job: Job, role: RoleProgram, source: ModelSource, process: Process) -> TrainModel:
    """Shapes on the meta device, adapters, sharding, then weights: a rank holds its part only.

    Frozen weights are stored in the job's dtype; what is trained in the plan's "master" dtype
    (the job's unless it says otherwise), computed in "compute" (the job's dtype).
    """
    model = bind_model(job, role, source.config, process.mesh)
    model.decoder.to_empty(device=process.device)
    _fill(model, job, source)
    model.decoder.train()
    return model


def bind_model(job: Job, role: RoleProgram, config: DecoderConfig, mesh: DeviceMesh) -> TrainModel:
    """The same on the meta device: bound, without values.

    Args:
        config: of the source; its dtype is the job's.

    Raises:
        PlanError: `plan/illegal` from the binders.
    """
    dtypes = {"master": job.train.master_dtype, "compute": job.model.dtype, "reduce": "float32"}
    dtypes |= dict(role.dtypes)
    lora = lora_of(job, config)
    specs: dict[str, list[Spec]] = {"data": [], "tensor": [], "context": []}
    for spec in role.built_specs():
        specs.setdefault(spec.family, []).append(spec)
    stages = bind_stages(role, config, mesh, lora)
    if stages is not None:
        _require_whole_stages(specs["data"])
    stored = config.dtype
    if lora is None:
        stored = dtypes["compute"]
        if job.plan.offload == "none" or any(map(_shards, specs["data"])):
            stored = stored_dtype(specs["data"], dtypes["master"], dtypes["compute"])
    # an optimizer whose state is elsewhere keeps master copies there
    masters = dtypes["master"] if lora is None and job.plan.offload == "none" else ""
    parts = None if stages is None else list(stages.parts.values())
    decoder = Decoder(config.with_dtype(stored), device="meta", parts=parts)
    if lora is not None:
        inject(decoder, lora, dtype=dtypes["master"])
    tensor = bind_decoder(decoder, specs["tensor"], mesh)
    context = bind_context(specs["context"], mesh, config, tensor.degree)
    apply_recompute(decoder, role.recompute)
    data = bind_data(
        decoder,
        specs["data"],
        mesh,
        context=() if context is None else context.axes,
        apart=_last_beside_first(decoder, stages),
        param_dtype=dtypes["compute"],
        reduce_dtype=dtypes["reduce"],
        master_dtype=masters,
    )
    model = TrainModel(decoder, data, tensor, lora, stages, context)
    return replace(
        model,
        compute_dtype=dtypes["compute"],
        master_dtype=dtypes["master"],
        label_smoothing=job.train.label_smoothing,
    )


def _shards(spec: Spec) -> bool:
    return spec.rules()[-1].placement == "shard"


def _last_beside_first(decoder: Decoder, stages: BoundStages | None) -> list[nn.Module]:
    """What stands behind the layers, where this rank also has what stands before them in another
    stage: passes of both are under way at a time. A tied head is counted at the embedding."""
    if stages is None or not (stages.holds_first and stages.holds_last and stages.num_stages > 1):
        return []
    return (
        [decoder.model.norm] if decoder.config.tied_head else [decoder.model.norm, decoder.lm_head]
    )


def _require_whole_stages(data: Sequence[Spec]) -> None:
    """Sharded weights would be gathered at every visit of a stage, twice per micro-batch."""
    names = [spec.policy_name for spec in data if _shards(spec)]
    if names:
        rule = "gathers weights at every visit of a stage of a pipeline, in the way of its messages"
        legal = ["zero with stage 1 or 2", "replicate"]
        raise PlanError("plan/illegal", "plan.data", names, rule, legal=legal)


def _fill(model: TrainModel, job: Job, source: ModelSource) -> None:
    """Weights and adapters, each stored or drawn from the seed; a rank takes what it holds."""
    decoder, lora, seed = model.decoder, model.lora, job.train.seed
    parameters = dict(decoder.named_parameters())
    adapters = [name for name in parameters if ".lora_" in name]
    if source.weights:
        others = [name for name in parameters if ".lora_" not in name]
        load_sharded(decoder, source.weights, names=others)
    else:
        specs = canonical_tensors(decoder.config).values()
        values = initial_values(seed, (spec for spec in specs if spec.name in parameters))
        load_parameters(decoder, values, strict=not adapters)
    if not adapters:
        return
    if job.train.adapter:
        load_sharded(decoder, adapter_weights(job.train.adapter, decoder.config), names=adapters)
        return
    master = str(parameters[adapters[0]].dtype).removeprefix("torch.")
    load_parameters(decoder, lora_values(decoder.config, lora, seed, master), strict=False)

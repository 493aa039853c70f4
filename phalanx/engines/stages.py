"""A pipeline as one rank sees it: which stages it holds, who holds the others, what they share."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed import DeviceMesh
from torch.distributed.tensor import DTensor

from phalanx.engines.bind import BoundData
from phalanx.errors import PlanError
from phalanx.layout.stage_split import StageRange, split_layers, stage_ranges
from phalanx.models.decoder import Decoder, Part
from phalanx.models.spec import DecoderConfig, LoraSpec
from phalanx.plan import RoleProgram
from phalanx.policy import Order

AXIS = "pp"
_EMBEDDING = "model.embed_tokens.weight"


class BoundStages:
    """The stages of a decoder, dealt to the ranks along the pipeline axis.

    Args:
        order: which pass comes when.
        group: the ranks of this pipeline, by their coordinate.
        ranges: of all stages.
        config: of the whole decoder.

    Attributes:
        rank, num_ranks: mine on the pipeline axis, and how many there are.
        rank_of_stage: who holds each stage.
        parts: stage -> part of the decoder, for the stages of this rank.
        tied: names of parameters that this rank holds beside the rank that counts them: the tied
            embedding where the head is, if another rank embeds.
    """

    def __init__(
        self,
        order: Order,
        group: dist.ProcessGroup,
        ranges: Sequence[StageRange],
        config: DecoderConfig,
    ) -> None:
        self.order, self.group, self.axis = order, group, AXIS
        self.rank, self.num_ranks = group.rank(), group.size()
        self.rank_of_stage = order.rank_of_stage(self.num_ranks)
        self.parts: Mapping[int, Part] = {
            stage: Part(range(each.start, each.stop), each.embeds, each.ends)
            for stage, each in enumerate(ranges)
            if self.rank_of_stage[stage] == self.rank
        }
        self._shares_embedding = config.tied_head and self.first != self.last
        shares = self._shares_embedding and self.holds_last
        self.tied = frozenset([_EMBEDDING]) if shares else frozenset()

    @property
    def num_stages(self) -> int:
        """Of the whole model."""
        return len(self.rank_of_stage)

    @property
    def first(self) -> int:
        """The rank that embeds."""
        return self.rank_of_stage[0]

    @property
    def last(self) -> int:
        """The rank that computes the loss."""
        return self.rank_of_stage[-1]

    @property
    def holds_first(self) -> bool:
        """Whether this rank embeds."""
        return self.rank == self.first

    @property
    def holds_last(self) -> bool:
        """Whether this rank computes the loss."""
        return self.rank == self.last

    def views(self, decoder: Decoder) -> dict[int, StageView]:
        """Stage -> module, for the stages of this rank."""
        return {stage: StageView(decoder, part) for stage, part in self.parts.items()}

    def uses(self, decoder: Decoder) -> dict[nn.Parameter, int]:
        """Parameters that get more than one gradient per micro-batch on this rank, and how many: a
        tied embedding whose two ends are stages of one rank."""
        is_twice = self.holds_first and self.holds_last and self.num_stages > 1
        if not (decoder.config.tied_head and is_twice):
            return {}
        weight = decoder.model.embed_tokens.weight
        return {weight: 2} if weight.requires_grad else {}

    def finish_step(self, decoder: Decoder, data: BoundData) -> None:
        """Sum the gradient of a tied embedding over the two ranks that hold it.

        Once a step, when data and tensor axes are done: both ranks have cut it alike. Each adds
        what the other sends, so both get the same bits. A rank that has none (a loss that asks for
        no logits) sends zeros, as the other waits for it.
        """
        if not self._shares_embedding or not (self.holds_first or self.holds_last):
            return
        weight = data.held(decoder.model.embed_tokens.weight)
        if not weight.requires_grad:
            return
        if weight.grad is None:
            weight.grad = torch.zeros_like(weight)
        grad = weight.grad
        self._add_peers(grad.to_local() if isinstance(grad, DTensor) else grad)

    def _add_peers(self, mine: Tensor) -> None:
        peer = dist.get_global_rank(self.group, self.last if self.holds_first else self.first)
        sent, theirs = mine.contiguous(), mine.new_empty(mine.shape)
        works = dist.batch_isend_irecv(
            [
                dist.P2POp(dist.isend, sent, peer, self.group),
                dist.P2POp(dist.irecv, theirs, peer, self.group),
            ]
        )
        for work in works:
            work.wait()
        mine.add_(theirs)


class StageView(nn.Module):
    """One stage of a decoder as a module of its own: rows in, rows out, keywords as the decoder's.

    Args:
        decoder: with this stage among its parts.
        part: the stage.

    Attributes:
        held: what the stage is made of, so that its parameters are those of this stage alone.
    """

    def __init__(self, decoder: Decoder, part: Part) -> None:
        super().__init__()
        self.part = part
        self._decoder = (decoder,)  # unregistered: it holds other stages too
        body, ties = decoder.model, decoder.config.tied_head
        held = [body.layers[str(at)] for at in part.layers]
        held += [body.embed_tokens] if part.embeds or (part.ends and ties) else []
        held += [body.norm] if part.ends else []
        held += [decoder.lm_head] if part.ends and not ties else []
        self.held = nn.ModuleList(held)

    def forward(self, rows: Tensor, **keywords) -> Tensor:
        """Hidden states [S, D]; `rows` are token ids [S] where the stage embeds, else [S, D]."""
        hidden_SD = self._decoder[0](rows, part=self.part, **keywords)
        if torch.is_grad_enabled() and not hidden_SD.requires_grad:
            # nothing in it is trained: what the next stage sends back ends here
            return hidden_SD.detach().requires_grad_()
        return hidden_SD


def bind_stages(
    role: RoleProgram, config: DecoderConfig, mesh: DeviceMesh, lora: LoraSpec | None = None
) -> BoundStages | None:
    """The stages of a role; None where no axis cuts the model into stages.

    Reads `role.order`, and `role.batch["stages"]`: [[start, stop], ...] in model order; without it
    the layers are split as `layout.stage_split.split_layers` does.

    Raises:
        PlanError: `plan/illegal` for an axis without an order, an order without its axis, and
            stages that are not those of the order or the model.
    """
    num_ranks = mesh[AXIS].size() if AXIS in (mesh.mesh_dim_names or ()) else 1
    if num_ranks == 1:
        return None
    order = role.built_order()
    if order is None:
        rule = "a pipeline needs an order of its passes (plan.pipeline)"
        raise PlanError("plan/illegal", f"plan.mesh.{AXIS}", num_ranks, rule, legal=[1])
    wanted = order.num_stages(num_ranks)
    stages = role.batch.get("stages")
    ranges = stage_ranges(stages) if stages else split_layers(config, wanted, lora=lora)
    where = f"policy.{order.family}.{order.policy_name}"
    if len(ranges) != wanted:
        rule = f"{num_ranks} ranks run {wanted} stages of this order"
        raise PlanError("plan/illegal", f"{where}: stages", len(ranges), rule, legal=[wanted])
    if ranges[-1].stop != config.num_layers:
        rule = f"the model has {config.num_layers} layers"
        legal = [config.num_layers]
        raise PlanError("plan/illegal", f"{where}: stages", ranges[-1].stop, rule, legal=legal)
    return BoundStages(order, mesh.get_group(AXIS), ranges, config)

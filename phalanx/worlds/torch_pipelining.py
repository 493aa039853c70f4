"""Runs the compute lists of an Order on torch's pipelining runtime, with planned shapes.

The one file that touches torch's private pipelining interface (torch 2.13). Torch's own: lowering
the lists to its IR (sends, receives, FSDP's unshard and reduce), the loop that executes it, the
passes through a stage. Changed here, and why:
- Shapes come from the plan, one per micro-batch. Torch asks the neighbours for the shapes of the
  first micro-batch and allocates receive buffers of that one shape for all of them, before the
  first step. Here nothing is asked, and a buffer lives from its receive to its last use.
- What a stage produced is compared with the plan before it is sent: gloo ends the process of a
  receiver whose buffer is too small, and leaves the rest of one that is too large as it was.
- Losses are found by micro-batch; torch finds them by position in the order of forward passes.
- A weight gradient computes a checkpointed layer again once; torch's asks autograd for one group of
  weights after another, each of which would compute it again.
- A gradient that autograd returns as an expanded view, or not at all, is sent as a plain tensor.
- What was executed is logged with times.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from functools import partial
from itertools import takewhile
from typing import Any

import torch
from torch import Tensor, nn
from torch import distributed as dist
from torch.distributed.fsdp import FSDPModule
from torch.distributed.pipelining import PipelineStage
from torch.distributed.pipelining._utils import _StageMeta, _TensorMeta
from torch.distributed.pipelining.schedules import (
    _Action,
    _add_reduce_grad,
    _add_send_recv,
    _add_unshard_reshard,
    _ComputationType,
    _PipelineScheduleRuntime,
)
from torch.distributed.pipelining.stage import _RecvInfo
from torch.utils.checkpoint import GraphExecGroup

from phalanx.errors import WorldError
from phalanx.worlds.pipeline_plan import PipelinePlan, Planned, PlannedShapes
from phalanx.worlds.torch_log import FollowedList, SpanLog


def lowered_lists(plan: PipelinePlan) -> list[list[str]]:
    """Each rank's list in torch's IR text, transfers included ("0F3", "0SEND_F3", ...).

    Needs no process group and no module.
    """
    return [[str(action) for action in actions] for _, actions in sorted(_lower(plan).items())]


def _lower(plan: PipelinePlan) -> dict[int, list[_Action]]:
    """Torch's passes, with the transfers derived from the computes alone.

    Torch inserts FSDP's actions first, and its pass for transfers advances one action per round, so
    that a rank with more stages receives earlier in its list; where a transfer stands would depend
    on whether anything may be sharded.
    """
    computes = {
        rank: [_Action(s.stage, _ComputationType(s.kind), s.item) for s in steps]
        for rank, steps in enumerate(plan.lists)
    }
    copies = {rank: list(actions) for rank, actions in computes.items()}  # torch empties them
    with_transfers = _add_send_recv(copies, plan.rank_of_stage.__getitem__, plan.num_stages)
    return {
        rank: _woven(
            with_transfers[rank], _add_reduce_grad(_add_unshard_reshard(actions), plan.num_items)
        )
        for rank, actions in computes.items()
    }


def _woven(with_transfers: list[_Action], with_fsdp: list[_Action]) -> list[_Action]:
    """Insert FSDP's actions into the list with transfers, each before the compute that follows."""
    rest = iter(with_fsdp)
    woven: list[_Action] = []
    for action in with_transfers:
        if action.is_compute_op:
            woven += takewhile(lambda other, compute=action: other != compute, rest)
        woven.append(action)
    return [*woven, *rest]


class TorchPipeline:
    """One rank of a pipeline; all ranks of `group` construct theirs with the same plan.

    Args:
        plan: lists, placement and shapes.
        modules: stage -> module, for the stages of this rank. A module takes one tensor (and the
            keywords of `step`) and returns one tensor.
        loss_fn: `loss_fn(output, target, num_counted_global=n)` gives the sum over the counted
            tokens of one micro-batch, divided by n; gradients are not scaled any further.
        group: ranks of the pipeline in the order of their coordinates (None: all).
        device: where modules and activations lie.
        axis: name of the pipeline axis in trace rows.
        log: that spans are added to, with its own origin, for a caller that logs more than this
            (None: one of this pipeline's, which forgets a step when the next begins).
        after: called with kind ("F", "B", "I", "W"), stage and item of each compute that has ended.

    Raises:
        PlanError: `order/illegal` when group or modules do not fit the plan.
    """

    def __init__(
        self,
        plan: PipelinePlan,
        modules: Mapping[int, nn.Module],
        loss_fn: Callable[..., Tensor],
        *,
        group: dist.ProcessGroup | None = None,
        device: torch.device | str = "cpu",
        axis: str = "pp",
        log: SpanLog | None = None,
        after: Callable[[str, int, int], None] | None = None,
    ) -> None:
        self.plan, self.axis, self.rank = plan, axis, dist.get_rank(group)
        plan.require_fit(dist.get_world_size(group), self.rank, list(modules))
        self._group, device = group, torch.device(device)
        self._log, self._keeps_log = log or SpanLog(device), log is not None
        self._stages = [
            _PlannedStage(plan, stage, modules[stage], self._log, device, group)
            for stage in plan.stages_of(self.rank)
        ]
        self._runtime = _PlannedRuntime(
            self._stages, plan.num_items, loss_fn=loss_fn, scale_grads=False
        )
        self._runtime._prepare_schedule_with_comms(_lower(plan), format="compute_comms")
        lists = self._runtime.pipeline_order_with_comms
        ended = None if after is None else partial(_tell, after)
        self._actions = lists[self.rank] = FollowedList(lists[self.rank], self._log, ended)

    def step(
        self,
        inputs: Sequence[Tensor] | None = None,
        targets: Sequence[Any] | None = None,
        *,
        num_counted_global: int | Tensor,
        keywords: Sequence[Mapping[str, Any]] | None = None,
    ) -> list[Tensor]:
        """One forward and backward pass of all micro-batches; gradients add up in the modules.

        Args:
            inputs: of each micro-batch, on the rank of stage 0 (ignored elsewhere).
            targets: of each micro-batch, on the rank of the last stage (ignored elsewhere).
            num_counted_global: counted tokens of the whole global batch, over all replicas.
            keywords: of each micro-batch, what the stages of this rank get beside their input.

        Returns:
            The loss of each micro-batch, detached, on the rank of the last stage; else [].

        Raises:
            WorldError: `world/size` naming stage and micro-batch when an input or an output
                differs from the plan; raised before anything of that size is sent.
        """
        arguments = self._checked(inputs)
        for stage in self._stages:
            stage.clear_runtime_states()
        self._runtime.losses = {}
        if not self._keeps_log:
            self._log.restart()
        self._actions.arm()
        self._runtime._step_microbatches(
            arguments,
            None if keywords is None else [dict(each) for each in keywords],
            None if targets is None else list(targets),
            return_outputs=False,
            loss_kwargs={"num_counted_global": num_counted_global},
        )
        return [loss for _, loss in sorted(self._runtime.losses.items())]

    def set_shapes(self, shapes: PlannedShapes) -> None:
        """Plan the next steps for micro-batches of other sizes, as many as before.

        All ranks of the pipeline call it with the same shapes between two steps; nothing is sent.

        Raises:
            PlanError: `order/illegal` for another number of stages or micro-batches.
        """
        self.plan = self.plan.with_shapes(shapes)
        for stage in self._stages:
            stage.set_shapes(shapes)

    def _checked(self, inputs: Sequence[Tensor] | None) -> list[tuple[Tensor]] | None:
        if self.plan.rank_of_stage[0] != self.rank:
            return None
        if inputs is None or len(inputs) != self.plan.num_items:
            count = None if inputs is None else len(inputs)
            rule = "stage 0 needs one input per micro-batch"
            raise WorldError("world/size", "inputs", count, rule, legal=[self.plan.num_items])
        for item, tensor in enumerate(inputs):
            _require_planned(tensor, self.plan.shapes.entering(0, item), "input", 0, item)
        return [(tensor,) for tensor in inputs]

    def lowered_lists(self) -> list[list[str]]:
        """The lists of all ranks as torch executes them, in its IR text."""
        lists = self._runtime.pipeline_order_with_comms
        return [[str(action) for action in lists[rank]] for rank in sorted(lists)]

    def trace_rows(self, step: int = 0) -> list[dict[str, Any]]:
        """What this rank executed in the latest step, as rows for `TraceBuilder.extend`.

        A compute starts when its input has arrived. A transfer's row is its posting: it takes place
        between that and the compute that needs it. Times are seconds since the log was made: with
        this pipeline, unless it was given. FSDP's actions appear only where a stage is wrapped by
        it.
        """
        rows = []
        for action, start_s, end_s in self._log.spans_s():
            columns = self._columns(action) if isinstance(action, _Action) else None
            if columns is not None:
                row = {"rank": dist.get_rank(), "step": step, "action_id": str(action)}
                rows.append(row | {"start_s": start_s, "dur_s": end_s - start_s} | columns)
        return rows

    def _columns(self, action: _Action) -> dict[str, Any] | None:
        kind, stage, item = action.computation_type.value, action.stage_index, action[2]
        if item is None:
            module = next(s.submod for s in self._stages if s.stage_index == stage)
            return {"operator": kind.lower()} if isinstance(module, FSDPModule) else None
        if kind in ("F", "B", "I", "W"):
            return {"operator": f"stage.{kind}", "lane": "compute", "phase": kind, "item": item}
        operator, direction = kind.lower().split("_")
        neighbour = stage + (1 if (operator == "send") == (direction == "f") else -1)
        at = self.plan.rank_of_stage[neighbour]
        planned = self.plan.shapes.leaving(min(stage, neighbour), item)
        payload_bytes = torch.Size(planned.shape).numel() * _dtype(planned).itemsize
        return {
            "operator": operator,
            "lane": f"{operator}:{self.axis}:{at}",
            "axis": self.axis,
            "peer": at if self._group is None else dist.get_global_rank(self._group, at),
            "item": item,
            "payload_bytes": payload_bytes,
            "wire_bytes": payload_bytes if operator == "send" else 0,
        }


def _tell(after: Callable[[str, int, int], None], action: _Action) -> None:
    if action.is_compute_op:
        after(action.computation_type.value, action.stage_index, action.microbatch_index)


def _dtype(planned: Planned) -> torch.dtype:
    return getattr(torch, planned.dtype)


def _require_planned(value: object, planned: Planned, what: str, stage: int, item: int) -> None:
    got: object = type(value).__name__
    if isinstance(value, Tensor):
        got = Planned(tuple(value.shape), str(value.dtype).removeprefix("torch."))
    if got != planned:
        where = f"{what} of stage {stage}, micro-batch {item}"
        raise WorldError("world/size", where, got, "differs from the plan", legal=[planned])


class _PlannedStage(PipelineStage):
    """A stage that knows the size of each micro-batch."""

    def __init__(
        self,
        plan: PipelinePlan,
        stage: int,
        module: nn.Module,
        log: SpanLog,
        device: torch.device,
        group: dist.ProcessGroup | None,
    ) -> None:
        super().__init__(module, stage, plan.num_stages, device, group=group)
        self._log = log
        self.chunks, self.has_backward = plan.num_items, True
        self._runtime_validate = False  # torch's own check knows one shape per stage only
        self.act_send_info = {0: [] if self.is_last else [stage + 1]}
        self.set_shapes(plan.shapes)

    def set_shapes(self, shapes: PlannedShapes) -> None:
        """What the receives of the next steps expect; buffers are allocated by the receives."""
        self._shapes, stage = shapes, self.stage_index
        for item in range(self.chunks):
            into, out_of = shapes.entering(stage, item), shapes.leaving(stage, item)
            self.args_recv_info[item] = () if self.is_first else (_receive(stage - 1, into),)
            self.grad_recv_info[item] = () if self.is_last else (_receive(stage + 1, out_of),)
        one = (_meta(shapes.entering(stage, 0)),)  # torch reads how many there are
        self._stage_meta = _StageMeta(inputs=one, input_grads=one)

    def get_fwd_recv_ops(self, fwd_chunk_id: int) -> list[dist.P2POp]:
        self._allocate(self.args_recv_info[fwd_chunk_id])
        return super().get_fwd_recv_ops(fwd_chunk_id)

    def get_bwd_recv_ops(self, bwd_chunk_id: int) -> list[dist.P2POp]:
        self._allocate(self.grad_recv_info[bwd_chunk_id])
        return super().get_bwd_recv_ops(bwd_chunk_id)

    def _allocate(self, infos: Sequence[_RecvInfo]) -> None:
        for info in infos:
            shape, dtype = info.tensor_meta.shape, info.tensor_meta.dtype
            info.buffer = torch.empty(shape, dtype=dtype, device=self.device)

    def get_fwd_send_ops(self, fwd_chunk_id: int) -> list[dist.P2POp]:
        return _contiguous(super().get_fwd_send_ops(fwd_chunk_id))

    def get_bwd_send_ops(self, bwd_chunk_id: int) -> list[dist.P2POp]:
        return _contiguous(super().get_bwd_send_ops(bwd_chunk_id))

    def forward_one_chunk(self, fwd_chunk_id: int, args, kwargs=None, save_forward_output=True):
        self._log.input_arrived()
        output = super().forward_one_chunk(fwd_chunk_id, args, kwargs, save_forward_output)
        planned = self._shapes.leaving(self.stage_index, fwd_chunk_id)
        _require_planned(output, planned, "output", self.stage_index, fwd_chunk_id)
        _release(self.args_recv_info[fwd_chunk_id])  # from here on the graph keeps it
        return output

    def backward_one_chunk(
        self, bwd_chunk_id: int, loss=None, full_backward=True, last_backward=False
    ) -> None:
        self._log.input_arrived()
        super().backward_one_chunk(bwd_chunk_id, loss, full_backward, last_backward)
        _release(self.grad_recv_info[bwd_chunk_id])
        if not self.is_first and self.bwd_cache[bwd_chunk_id][0] is None:
            self._require_whole(full_backward, bwd_chunk_id)
            planned = self._shapes.entering(self.stage_index, bwd_chunk_id)
            zero = torch.zeros(planned.shape, dtype=_dtype(planned), device=self.device)
            self.bwd_cache[bwd_chunk_id] = (zero,)

    def backward_weight_one_chunk(self, bwd_chunk_id: int, last_backward=False) -> None:
        with GraphExecGroup():
            super().backward_weight_one_chunk(bwd_chunk_id, last_backward)

    def _require_whole(self, full_backward: bool, item: int) -> None:
        if not full_backward:
            where = f"backward pass of stage {self.stage_index}, micro-batch {item}"
            rule = "no gradient reaches its input, and then torch's weight gradients are empty"
            raise WorldError("world/unbound", where, "I", rule, legal=["B"])


def _receive(source: int, planned: Planned) -> _RecvInfo:
    return _RecvInfo(f"from stage {source}", source, buffer=None, tensor_meta=_meta(planned))


def _meta(planned: Planned) -> _TensorMeta:
    dtype = _dtype(planned)
    example = torch.empty(planned.shape, dtype=dtype, device="meta")
    return _TensorMeta.from_tensor(example.requires_grad_(dtype.is_floating_point))


def _release(infos: Sequence[_RecvInfo]) -> None:
    for info in infos:
        info.buffer = None


def _contiguous(ops: list[dist.P2POp]) -> list[dist.P2POp]:
    for op in ops:
        op.tensor = op.tensor.contiguous()
    return ops


class _PlannedRuntime(_PipelineScheduleRuntime):
    """Torch's loop without its exchange of shapes, and with losses by micro-batch."""

    losses: dict[int, Tensor]

    def _initialize_stages(self, args, kwargs, target=None, loss_kwargs=None) -> None:
        """Nothing: the stages know their shapes."""

    def _maybe_compute_loss(self, stage, output, target_mbs, mb_index, loss_kwargs=None) -> None:
        if stage.is_last:
            self.losses[mb_index] = self._compute_loss(output, target_mbs[mb_index], loss_kwargs)

    def _maybe_get_loss(self, stage, mb_index) -> Tensor | None:
        if not stage.is_last:
            return None
        loss = self.losses[mb_index]
        self.losses[mb_index] = loss.detach()  # the graph goes with its backward pass
        return loss

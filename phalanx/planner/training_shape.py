"""How a training role lies on the processes of this machine: mesh, policies, schedule, rows."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from math import lcm, prod
from typing import Any

from phalanx.check_order import check_order
from phalanx.cost.local_shapes import local_config
from phalanx.cost.training import Pipeline, Workload, row_tokens_for
from phalanx.cost.training import row_multiple as filled_up_to
from phalanx.errors import JobError, PlanError
from phalanx.job import Job
from phalanx.layout.context_part import require_head_split
from phalanx.layout.stage_split import StageRange, job_stages
from phalanx.layout.tensor_split import tensor_legality
from phalanx.layout.token_layout import row_multiple
from phalanx.mesh import Mesh
from phalanx.models.adapter_folder import lora_of
from phalanx.models.config import DecoderConfig
from phalanx.models.spec import weight_bytes
from phalanx.plan import RoleProgram
from phalanx.planner.data_axes import (
    DATA_AXES,
    require_cast,
    require_order,
    require_own_axes,
    require_sums,
    require_units,
)
from phalanx.planner.machine_here import memory_of_rank
from phalanx.planner.make import mesh_of, policy_tables
from phalanx.policy import Order, Spec
from phalanx.registry import build

PIPELINE_AXIS = "pp"
_SPEC_FAMILIES = ("data", "tensor", "context")
_NAMED_BY = {"plan.mesh", "plan.data", "plan.tensor", "plan.context"}


@dataclass(frozen=True)
class TrainingShape:
    """Mesh and policies of the training role.

    Attributes:
        tables: the specs as tables with family, name and options.
        specs: the same, built.
        order_table, order: the schedule of the pipeline likewise; {} and None without one.
        stages: the layers of each stage, as the job names them or where every token counts; ()
            without a pipeline.
    """

    mesh: Mesh
    tables: Sequence[Mapping[str, Any]]
    specs: Sequence[Spec]
    order_table: Mapping[str, Any] = field(default_factory=dict)
    order: Order | None = None
    stages: Sequence[StageRange] = ()

    @property
    def num_data_ranks(self) -> int:
        """Ranks that compute different rows."""
        return prod(self.mesh.degree(axis) for axis in DATA_AXES)

    @property
    def tensor_degree(self) -> int:
        """Ranks that share every product."""
        return self._degree("tensor")

    @property
    def context_degree(self) -> int:
        """Ranks that share the tokens of every row."""
        return self._degree("context")

    @property
    def pipeline_degree(self) -> int:
        """Ranks that share the layers."""
        return self.mesh.degree(PIPELINE_AXIS)

    @property
    def least_items(self) -> int:
        """Fewest micro-batches of a step that the schedule has an order for."""
        return self.order.least_items(self.pipeline_degree) if self.order is not None else 1

    @property
    def splits_tokens(self) -> bool:
        """Whether tensor ranks also share the tokens between blocks (sequence parallelism)."""
        exchanges = (
            exchange
            for spec in self.specs
            if spec.family == "tensor"
            for rule in spec.rules()
            if rule.placement == "block"
            for exchange in rule.exchanges
        )
        return any(each.collective == "reduce_scatter" for each in exchanges)

    @property
    def token_parts(self) -> int:
        """Rows hold a multiple of so many tokens: what the layout of tokens over context ranks asks
        for, and a part of each for every tensor rank that shares tokens."""
        layouts = [spec.rule_for("") for spec in self.specs if spec.family == "context"]
        pieces = [row_multiple(each.placement, self.context_degree) for each in layouts if each]
        return max([1, *pieces]) * (self.tensor_degree if self.splits_tokens else 1)

    def _degree(self, family: str) -> int:
        axes = {spec.axis for spec in self.specs if spec.family == family}
        return prod(self.mesh.degree(axis) for axis in axes)


def with_layout(job: Job, config: DecoderConfig, num_ranks: int) -> Job:
    """The job with a mesh and a data policy, where it names neither and no tensor or context
    policy.

    Adapters on a frozen base: whole copies, if a copy takes at most half of a rank's memory (then
    only adapters travel). Otherwise FSDP, which keeps gathered weights through a step if they take
    at most a quarter.
    """
    if _NAMED_BY & _named(job):
        return job
    whole, room = weight_bytes(config), memory_of_rank(num_ranks)
    if job.train.method == "lora" and whole <= room / 2:
        return _laid_out(job, {"replicate": num_ranks}, "replicate")
    fsdp = {"name": "fsdp", "reshard_after_forward": whole > room / 4}
    return _laid_out(job, {"shard": num_ranks}, fsdp)


def _with_data(job: Job) -> Job:
    """The same where the job names a mesh but no data policy: one for every data axis. Context
    ranks sum gradients as data ranks do, and weights that are cast need masters, so they have one
    too, on an axis of one rank."""
    mesh = dict(job.plan.mesh)
    if not mesh or "plan.data" in _named(job):
        return job
    is_staged = mesh.get(PIPELINE_AXIS, 1) > 1
    if _casts_weights(job) and job.plan.offload == "none" and "shard" not in mesh:
        mesh = _with_shard(mesh)
        # context ranks share the axis and have something to gather; one rank would copy for nothing
        cuts = job.plan.data if job.plan.context and not is_staged else "zero"
        return _laid_out(job, mesh, [cuts, "replicate"] if "replicate" in mesh else cuts)
    elif (job.plan.context or is_staged) and not any(axis in mesh for axis in DATA_AXES):
        mesh = {"shard" if _casts_weights(job) else "replicate": 1} | mesh
        if is_staged and "shard" in mesh:
            return _laid_out(job, mesh, "zero")
    if "replicate" not in mesh:
        return _laid_out(job, mesh, job.plan.data) if "shard" in mesh else job
    return _laid_out(job, mesh, [job.plan.data, "replicate"] if "shard" in mesh else "replicate")


def _with_shard(mesh: Mapping[str, int]) -> dict[str, int]:
    """The mesh with an axis of one rank that keeps masters, just inside of replicas."""
    axes = list(mesh.items())
    at = 1 + list(mesh).index("replicate") if "replicate" in mesh else 0
    return dict([*axes[:at], ("shard", 1), *axes[at:]])


def _laid_out(job: Job, mesh: Mapping[str, int], data: Any) -> Job:
    origin = dict(job.origin) | dict.fromkeys(("plan.mesh", "plan.data"), "chosen here")
    return replace(job, plan=replace(job.plan, mesh=dict(mesh), data=data), origin=origin)


def _named(job: Job) -> set[str]:
    """Keys of [plan] that the user gave, without what stands inside of them."""
    return {".".join(key.split(".")[:2]) for key in job.origin}


def training_shape(job: Job, config: DecoderConfig, num_ranks: int) -> TrainingShape:
    """How the training role lies on `num_ranks` processes.

    Raises:
        JobError: `mesh/product`.
        PlanError: `plan/illegal` for an axis that training cannot use or no policy uses, a degree
            that the model cannot be cut by, or weights that are gathered beside a pipeline.
        CheckError: for a schedule that lacks passes or can never finish.
    """
    job = _with_data(with_layout(job, config, num_ranks))
    mesh = mesh_of(job, num_ranks)
    order_table, tables = policy_tables(job, mesh)
    tables = [table for table in tables if table["family"] in _SPEC_FAMILIES]
    specs: list[Spec] = [_built(table) for table in tables]
    for spec in specs:
        if spec.axis not in mesh.names:
            where, rule = f"plan.{spec.family}", f"needs an axis {spec.axis!r} in plan.mesh"
            raise PlanError("plan/illegal", where, spec.policy_name, rule, legal=mesh.names)
    _require_used(mesh, specs)
    _require_trained(job, specs)
    shape = TrainingShape(mesh, tables, specs)
    _require_data(job, config, shape)
    _require_split_vocabulary(shape)
    if (degree := mesh.degree(PIPELINE_AXIS)) > 1:
        _require_whole_weights(mesh, specs)
        order: Order = _built(order_table)
        _require_runnable(order, degree)
        lora, wanted = lora_of(job, config), order.num_stages(degree)
        stages = job_stages(config, wanted, degree, job.plan.stages, lora=lora)
        shape = replace(shape, order_table=order_table, order=order, stages=stages)
    if shape.tensor_degree > 1:
        tensor_legality(config, shape.tensor_degree).require(_axis_of(shape, "tensor"))
    _require_heads(config, shape)
    if shape.num_data_ranks * shape.context_degree == 1 and not _casts_weights(job):
        # one rank has nothing to gather, and gathering would keep a second copy of every weight
        tables = [table for table in tables if table["family"] != "data"]
        shape = replace(shape, tables=tables, specs=[s for s in specs if s.family != "data"])
    return shape


def _require_runnable(order: Order, num_ranks: int) -> None:
    """Refuse a schedule that lacks passes or can never finish (`check_order`), as one that
    somebody wrote may."""
    num_stages = order.num_stages(num_ranks)
    num_items = max(order.least_items(num_ranks), order.wanted_items(num_ranks))
    lists = order.order(num_ranks, num_items)
    check_order(lists, num_stages, num_items, order.rank_of_stage(num_ranks))


def pipeline_of(role: RoleProgram, config: DecoderConfig) -> Pipeline:
    """Stages and schedule of a planned role."""
    order, ranks = role.built_order(), role.grid().degree(PIPELINE_AXIS)
    if order is None or ranks == 1:
        return Pipeline.whole(config)
    return Pipeline.of(config, order, ranks, role.batch["stages"])


def _built(table: Mapping[str, Any]) -> Any:
    return build(str(table["family"]), {k: v for k, v in table.items() if k != "family"})


def _axis_of(shape: TrainingShape, family: str) -> str:
    axis = next(spec.axis for spec in shape.specs if spec.family == family)
    return f"plan.mesh.{axis}"


def _require_used(mesh: Mesh, specs: Sequence[Spec]) -> None:
    """Refuse axes that nothing lies on."""
    used = {spec.axis for spec in specs} | {PIPELINE_AXIS, *DATA_AXES}
    for axis in mesh.names:
        if mesh.degree(axis) > 1 and axis not in used:
            rule = (
                "training uses data axes, an axis 'pp' for stages, and axes that plan.tensor or "
                "plan.context names; others are simulated"
            )
            raise PlanError("plan/illegal", f"plan.mesh.{axis}", mesh.degree(axis), rule, legal=[1])


def _require_trained(job: Job, specs: Sequence[Spec]) -> None:
    """Refuse to cut the update of weights that are not updated."""
    for spec in specs:
        cuts = spec.family == "data" and spec.rules()[-1].placement == "update"
        if cuts and job.train.method == "lora":
            rule = (
                "cuts gradients and moments of whole weights, of which adapters have next to none"
            )
            legal = ["replicate", "fsdp"]
            raise PlanError("plan/illegal", "plan.data", spec.policy_name, rule, legal=legal)


def _require_data(job: Job, config: DecoderConfig, shape: TrainingShape) -> None:
    """Refuse data policies that do not fit the mesh, the model or one another."""
    data = [spec for spec in shape.specs if spec.family == "data"]
    require_own_axes(shape.specs)
    require_sums(shape.mesh, data)
    require_order(shape.mesh.names, data, is_cut=shape.tensor_degree > 1)
    require_units(data, config)
    if _casts_weights(job) and job.plan.offload == "none":  # masters elsewhere are cast there
        require_cast(data, job.train.master_dtype, job.model.dtype)


def _require_split_vocabulary(shape: TrainingShape) -> None:
    """Refuse tokens that are split beside a whole vocabulary: lookups would be partial by token and
    logits whole, no one rule for a tied gradient."""
    rules = [rule for spec in shape.specs if spec.family == "tensor" for rule in spec.rules()]
    if not shape.splits_tokens or any(rule.placement == "vocab" for rule in rules):
        return
    if shape.tensor_degree > 1:
        name = next(spec.policy_name for spec in shape.specs if spec.family == "tensor")
        rule, legal = "splits tokens but not the vocabulary", ["vocabulary_parallel = true"]
        raise PlanError("plan/illegal", "plan.tensor", name, rule, legal=legal)


def _require_whole_weights(mesh: Mesh, specs: Sequence[Spec]) -> None:
    """Refuse weights that every visit of a stage would gather (DOI 10.1145/3695053.3731410,
    section 3.3)."""
    for spec in specs:
        shards = spec.family == "data" and spec.rules()[-1].placement == "shard"
        if shards and mesh.degree(spec.axis) > 1:
            rule = (
                "beside a pipeline every pass of every micro-batch would gather a stage's weights "
                "again; shard what is not needed there (stage 1 or 2), or keep copies"
            )
            legal = ["zero", "replicate"]
            raise PlanError("plan/illegal", "plan.data", spec.policy_name, rule, legal=legal)


def _require_heads(config: DecoderConfig, shape: TrainingShape) -> None:
    """Refuse context ranks that exchange heads where these do not divide, and two axes of which not
    exactly one does."""
    local = local_config(config, shape.tensor_degree)
    wide = [s for s in shape.specs if s.family == "context" and shape.mesh.degree(s.axis) > 1]
    by_heads = [s for s in wide if any(rule.placement == "all_to_all" for rule in s.rules())]
    if len(wide) > 2 or (len(wide) == 2 and len(by_heads) != 1):
        names = [spec.policy_name for spec in wide]
        rule = "two axes share rows where one of them exchanges heads, and only then"
        legal = ["ulysses on one axis and ring or all_gather on another", wide[0].policy_name]
        raise PlanError("plan/illegal", "plan.context", names, rule, legal=legal)
    for spec in by_heads:
        degree, where = shape.mesh.degree(spec.axis), f"plan.mesh.{spec.axis}"
        for kind in local.kinds:
            require_head_split(kind.num_heads, kind.num_kv_heads, degree, where)


def _casts_weights(job: Job) -> bool:
    """Whether data policies also turn what is trained into the dtype that computes."""
    return job.train.method != "lora" and job.train.master_dtype != job.model.dtype


def row_plan(job: Job, longest: int, shape: TrainingShape, device: str) -> dict[str, int]:
    """Tokens of a packed row, and what rows are filled up to a multiple of.

    Args:
        longest: tokens of the longest document.

    Raises:
        JobError: `job/bad-value` for `plan.row_tokens` below the longest document, or that the
            ranks of a context axis cannot share evenly.
    """
    parts = shape.token_parts
    multiple = lcm(filled_up_to(device), parts)
    chosen = job.plan.row_tokens
    if chosen and chosen < longest:
        rule = f"a document has {longest} tokens and is never cut between rows"
        raise JobError("job/bad-value", "plan.row_tokens", chosen, rule, legal=[longest])
    if chosen % parts and shape.context_degree > 1:
        shared = f"{shape.context_degree} context ranks"
        shared += f", {shape.tensor_degree} tensor ranks" if shape.splits_tokens else ""
        rule = f"must be a multiple of {parts} ({shared}), so that ranks share a row evenly"
        above = -(-max(chosen, longest) // parts) * parts
        legal = [each for each in (above - parts, above) if each >= longest]
        raise JobError("job/bad-value", "plan.row_tokens", chosen, rule, legal=legal)
    return {"row_tokens": chosen or row_tokens_for(longest, multiple), "row_multiple": multiple}


def require_items(job: Job, work: Workload, shape: TrainingShape) -> None:
    """Refuse a job none of whose steps has enough micro-batches for its schedule, or gives every
    rank of the pipeline one; a step that has fewer than others is filled up, or leaves ranks idle.
    And one with more of them than a written schedule has.

    Raises:
        PlanError: `plan/illegal`, naming the tokens of a step that would suffice.
    """
    order, num_ranks, tokens = shape.order, shape.pipeline_degree, job.train.global_batch_tokens
    if order is None:
        return
    wanted, most = order.wanted_items(num_ranks), order.most_items(num_ranks)
    if most is not None and work.most_items > most:
        rule = (
            f"a step has up to {work.most_items} micro-batches on each of {shape.num_data_ranks} "
            f"data ranks, and plan.pipeline is written for {most}: smaller steps or longer rows "
            "(plan.row_tokens)"
        )
        # one row less than there may be, as documents do not fill them up
        legal = [max(1, most - 1) * work.row_limit * shape.num_data_ranks]
        raise PlanError("plan/illegal", "train.global_batch_tokens", tokens, rule, legal=legal)
    if work.most_items >= wanted:
        return
    count = f"{work.most_items} micro-batch{'es' * (work.most_items > 1)}"
    rule = (
        f"a step has {count} of up to {work.row_limit} tokens on each of {shape.num_data_ranks} "
        f"data ranks, and {order.policy_name} on {num_ranks} ranks needs {wanted}: larger steps, "
        "shorter rows (plan.row_tokens) or fewer stages"
    )
    rule += "" if shape.least_items > 1 else "; gpipe takes any number"
    enough = wanted * work.row_limit * shape.num_data_ranks
    raise PlanError("plan/illegal", "train.global_batch_tokens", tokens, rule, legal=[enough])

"""The first step of a run of many ranks, computed again by one process that adds in its order.

What `ordered.OrderedReference` does for a step, from a run folder: the same job, data, weights and
rows, and the summaries of everything compared with those that the run recorded.
"""

from __future__ import annotations

import tempfile
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch

from phalanx.analyze.first_divergence import Divergence, compare, read_recorded
from phalanx.cost.training import counted_weight, row_multiple
from phalanx.data.batches import SampleStream, StepBatch, step_batch
from phalanx.data.prepare import Prepared
from phalanx.engines.fingerprint import Fingerprints
from phalanx.engines.ordered import MOST_DATA_RANKS, OrderedReference
from phalanx.engines.process import start_process
from phalanx.engines.row_loss import DropoutKeys
from phalanx.engines.run_folder import read_run
from phalanx.engines.train import prepared
from phalanx.engines.trainer_model import build_model
from phalanx.engines.user_loss import load_loss
from phalanx.errors import PlanError
from phalanx.job import Job
from phalanx.layout.stage_split import split_layers, stage_ranges
from phalanx.mesh import Mesh
from phalanx.models.adapter_folder import lora_of
from phalanx.models.spec import DecoderConfig
from phalanx.plan import RoleProgram

EMULATED = ("replicate", "pp")


def against_reference(folder: str | Path) -> Divergence:
    """Compare the first step of a recorded run with its reference, to the bit.

    Raises:
        JobError: `job/not-found` for a folder without a recording.
        PlanError: `plan/illegal` for axes whose order of additions one process cannot take;
            `trace/runs` where the first step was not recorded.
    """
    job, plan = read_run(folder)
    role, recorded = plan.program("train"), read_recorded(folder)
    _require_emulated(role)
    first = {place: each for place, each in recorded.places.items() if place[0] == 1}
    if not first:
        rule = "the first step was not recorded; a run that goes on has none"
        raise PlanError("trace/runs", "run folder", folder, rule)
    with tempfile.TemporaryDirectory() as own, start_process(role.device, Mesh(replicate=1)) as at:
        threads, before = recorded.threads, torch.get_num_threads()
        torch.set_num_threads(threads)  # products are split by them
        try:
            _record_reference(job, role, Path(own), at)
        finally:
            torch.set_num_threads(before)
        return compare(replace(recorded, places=first), read_recorded(own))


def _require_emulated(role: RoleProgram) -> None:
    mesh = role.grid()
    other = [axis for axis in mesh.names if mesh.degree(axis) > 1 and axis not in EMULATED]
    if other:
        rule = "adds within a token or a weight, in an order that one process does not have"
        raise PlanError("plan/illegal", "plan.mesh", other[0], rule, legal=EMULATED)
    if mesh.degree("replicate") > MOST_DATA_RANKS:
        rule = "the order in which more ranks are summed is not known here"
        value, legal = mesh.degree("replicate"), [MOST_DATA_RANKS]
        raise PlanError("plan/illegal", "plan.mesh.replicate", value, rule, legal=legal)
    if any(spec["name"] not in ("replicate", "fsdp") for spec in role.specs):
        names = [spec["name"] for spec in role.specs]
        rule = "only whole weights and gradients are emulated"
        raise PlanError("plan/illegal", "plan.data", names, rule, legal=["replicate"])
    if role.dtypes.get("master") != role.dtypes.get("compute"):
        rule = "weights that are cast for a step are not emulated"
        value = f"{role.dtypes.get('master')}, computed in {role.dtypes.get('compute')}"
        legal = [f"train.master_dtype = {role.dtypes.get('compute')}"]
        raise PlanError("plan/illegal", "train.master_dtype", value, rule, legal=legal)


def _record_reference(job: Job, role: RoleProgram, folder: Path, process: Any) -> None:
    source, data = prepared(job, lambda _text: None)
    alone = replace(role, mesh={"replicate": 1}, specs=(), order={})
    model = build_model(job, alone, source, process)
    config, num_ranks = source.config, role.grid().degree("pp")
    order = role.built_order() if num_ranks > 1 else None
    ranges = stage_ranges([[0, config.num_layers]])
    if order is not None:
        stages = role.batch.get("stages")
        wanted, lora = order.num_stages(num_ranks), lora_of(job, config)
        ranges = stage_ranges(stages) if stages else split_layers(config, wanted, lora=lora)
    loss = load_loss(job.train.loss) if job.train.loss else None
    ordered = OrderedReference(model, order, num_ranks, ranges, process.device, loss)
    least_rows = 1 if order is None else order.least_items(num_ranks)
    record = Fingerprints(model, 0, folder, 1)
    batches = _batches(job, role, data, config, least_rows)
    with record.step(0):
        ordered.gradients(batches, DropoutKeys(job.train.seed, 0))
        record.gradients()


def _batches(
    job: Job, role: RoleProgram, data: Prepared, config: DecoderConfig, least_rows: int
) -> list[StepBatch]:
    """The first step's rows of each data rank, dealt as the run dealt them."""
    stream, batch = SampleStream(data.train, job.train.seed), role.batch
    num_ranks = role.grid().degree("replicate")
    multiple = int(batch.get("row_multiple", row_multiple(role.device)))
    return [
        step_batch(
            stream,
            0,
            global_batch_tokens=job.train.global_batch_tokens,
            row_tokens=max(data.longest, int(batch.get("row_tokens", 0))),
            num_ranks=num_ranks,
            rank=rank,
            counted_weight=counted_weight(config),
            row_multiple=multiple,
            least_rows=least_rows,
        )
        for rank in range(num_ranks)
    ]

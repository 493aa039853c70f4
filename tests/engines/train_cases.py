"""A tiny training run in the workers of `run_ranks`, for the tests of the engine."""

from __future__ import annotations

import json
import os
from collections.abc import Sequence
from math import prod
from pathlib import Path
from typing import Any

import torch.distributed as dist

from phalanx.engines.callbacks import Callback
from phalanx.engines.train import train
from phalanx.job import load_job
from phalanx.plan import Plan, Pool, RoleProgram
from phalanx.worlds.logged_group import init_logged
from tests.ranks import current_store, run_ranks

FSDP = {"family": "data", "name": "fsdp"}
REPLICATE = {"family": "data", "name": "replicate"}
SMALL = {
    "model.name": "tiny",
    "model.dtype": "float32",
    "model.layers": 2,
    "model.width": 32,
    "model.vocabulary": 300,
    "data.max_tokens": 96,
    "data.held_out_frac": 0.2,
    "train.method": "pretrain",
    "train.steps": 4,
    "train.warmup_steps": 1,
    "train.global_batch_tokens": 300,
    "train.lr": 1e-3,
    "train.weight_decay": 0.1,
}


def train_in(
    rank: int,
    world_size: int,
    folder: str,
    flags: dict[str, Any],
    mesh: dict[str, int],
    specs: Sequence[dict[str, Any]],
    role: dict[str, Any],
    callbacks: Sequence[Callback] = (),
    resume: str | bool | None = None,
):
    """Train in this process: the result and the lines of the metrics file."""
    os.environ["XDG_CACHE_HOME"] = str(Path(folder).parent / "cache")
    init_logged("gloo", dist.PrefixStore("logged", current_store()), rank, world_size)
    job = load_job(None, flags)
    program = RoleProgram(pool="all", mesh=mesh, specs=specs, device="cpu", **role)
    pools = {"all": Pool(machine="here", devices=tuple(range(world_size)))}
    plan = Plan(
        job="job", job_key=job.result_key, hardware={}, pools=pools, programs={"train": program}
    )
    result = train(job, plan, folder, callbacks=callbacks, resume=resume)
    lines = (Path(folder) / "metrics.jsonl").read_text().splitlines()
    return result, [json.loads(line) for line in lines]


def run_train(
    folder: Path,
    flags: dict[str, Any],
    mesh: dict[str, int] | None = None,
    specs: Sequence[dict[str, Any]] = (FSDP,),
    callbacks: Sequence[Callback] = (),
    resume: str | bool | None = None,
    **role: Any,
):
    """What `train_in` returned on rank 0 of a mesh; `role` has fields of the RoleProgram."""
    mesh = mesh or {"shard": 1}
    folder.mkdir(exist_ok=True)
    args = (str(folder), SMALL | flags, mesh, list(specs), role, callbacks, resume)
    return run_ranks(train_in, prod(mesh.values()), *args, backend=None)[0]


def values(metrics: list[dict[str, Any]], kind: str, key: str) -> list[Any]:
    """One number of each line of a kind."""
    return [line[key] for line in metrics if line["kind"] == kind]

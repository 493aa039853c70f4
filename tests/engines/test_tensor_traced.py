"""The tensor-parallel step traced for a device: fake tensors, and a group that sends nothing.

What a machine without the device can show: shapes, devices and dtypes of the whole step fit,
nothing is made on the host, and no value is read back. The device is CUDA where torch is built with
it. A CPU build has neither autograd nor indexing for CUDA's fake tensors; there the meta device
stands for it, which mixes with the host's tensors no more than CUDA does. `fully_shard` allocates
on its device by itself, so the data axis cannot be traced this way.
"""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
import torch.distributed as dist
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.testing._internal.distributed.fake_pg import FakeStore

from phalanx.data.batches import MicroBatch
from phalanx.engines.trainer_model import TrainModel, bind_model
from phalanx.models.spec import LoraSpec
from phalanx.ops.dropout import DropoutKey
from tests.engines.tensor_cases import MEGATRON, SEQUENCE, Case, job_and_role, rows_of
from tests.models.families import tiny_config
from tests.ranks import run_ranks

DEVICE, MESH_DEVICE = ("cuda", "cuda") if torch.backends.cuda.is_built() else ("meta", "cpu")
DEGREE, RANK = 4, 2  # above the key and value heads of most
FULL = Case(config=tiny_config("gemma3"), mesh={"tp": DEGREE}, specs=(MEGATRON,))
ADAPTED = replace(FULL, lora=LoraSpec(rank=3, alpha=7.0, dropout=0.1))
BFLOAT16 = {"master": "float32", "compute": "bfloat16"}
CASES = {
    "gemma3": FULL,
    "untied head": replace(FULL, config=tiny_config("llama3")),
    "per-layer embedding": replace(FULL, config=tiny_config("gemma4_ple")),
    "tokens split": replace(FULL, specs=(SEQUENCE,), config=tiny_config("gemma4_ple")),
    "layers again": replace(FULL, recompute="full", specs=(SEQUENCE,)),
    "adapters": ADAPTED,
    "bf16 base": replace(ADAPTED, config=tiny_config("gemma4", "bfloat16"), dtypes=BFLOAT16),
    "adapters, tokens split": replace(ADAPTED, specs=(SEQUENCE,)),
}


def traced(rank: int, world_size: int) -> list[set[str]]:
    """Of each case: devices of loss, gradients and parameters."""
    dist.init_process_group("fake", store=FakeStore(), rank=RANK, world_size=DEGREE)
    mesh = dist.init_device_mesh(MESH_DEVICE, (DEGREE,), mesh_dim_names=("tp",))
    return [traced_step(case, mesh) for case in CASES.values()]


def traced_step(case: Case, mesh: dist.DeviceMesh) -> set[str]:
    job, role = job_and_role(case)
    model = bind_model(job, role, case.config, mesh)
    # what is traced was bound on the meta device, outside
    with FakeTensorMode(allow_non_fake_inputs=True):
        model.decoder.to_empty(device=DEVICE)
        model.decoder.train()
        for row in rows_of(case, 0)[:2]:
            loss = fake_loss(model, row.extended(model.row_multiple), bool(case.lora))
            loss.backward()
        model.finish_step()
    trained = [p for p in model.decoder.parameters() if p.requires_grad]
    grads = [p.grad for p in trained]
    assert all(grad.shape == p.shape and grad.dtype == p.dtype for p, grad in zip(trained, grads))
    return {_local(x).device.type for x in (loss, *trained, *grads)}


def fake_loss(model: TrainModel, row: MicroBatch, drops: bool) -> Tensor:
    def on_device(array) -> Tensor:
        return torch.zeros(array.shape, dtype=torch.int64, device=DEVICE)

    key = DropoutKey(1, 0, on_device(row.global_tokens_S)) if drops else None
    hidden_SD = model.decoder(
        on_device(row.tokens_S), on_device(row.positions_S), row.document_starts, dropout=key
    )
    return model.loss(hidden_SD, on_device(row.counted_N), on_device(row.targets_N), 7)


def _local(x: Tensor) -> Tensor:
    return x.to_local() if hasattr(x, "to_local") else x


@pytest.mark.dist
def test_a_step_traces_without_touching_the_host():
    (found,) = run_ranks(traced, 1, backend=None)
    assert found == [{DEVICE}] * len(CASES)

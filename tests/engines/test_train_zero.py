"""`train` with a cut update: losses, norms and exports of one process, alone and beside stages."""

from __future__ import annotations

import pytest
import torch

from phalanx.engines.checkpoint.manifest import Manifest
from tests.engines.layout_cases import answers, exported, numbers
from tests.engines.train_cases import run_train, values
from tests.tiny_run import write_pairs

ZERO_1 = {"family": "data", "name": "zero"}
ZERO_2 = ZERO_1 | {"stage": 2}
ORDERS = {
    "interleaved": ZERO_2,
    "zbv": ZERO_1,  # gradients of weights come past autograd's hooks
}


@pytest.fixture(scope="module")
def source(tmp_path_factory):
    return str(write_pairs(tmp_path_factory.mktemp("data") / "pairs.jsonl"))


@pytest.fixture(scope="module")
def one_process(tmp_path_factory, source):
    folder = tmp_path_factory.mktemp("expected") / "one"
    flags = {"data.source": source, "model.layers": 4, "train.steps": 2}
    return flags, folder, *run_train(folder, flags)


@pytest.mark.dist
@pytest.mark.parametrize("order", ORDERS)
def test_stages_and_a_cut_update_change_nothing(tmp_path, one_process, order):
    flags, folder, result, metrics = one_process
    other, found = run_train(
        tmp_path / "four",
        flags,
        {"shard": 2, "pp": 2},
        (ORDERS[order],),
        order={"family": "pipeline", "name": order},
        batch={"row_tokens": 48},
    )
    torch.testing.assert_close(numbers(found), numbers(metrics), rtol=1e-5, atol=0.0)
    assert answers(other) == answers(result)
    expected, mine = exported(folder), exported(tmp_path / "four")
    assert mine.keys() == expected.keys()
    for name, value in expected.items():
        torch.testing.assert_close(mine[name], value, rtol=0.0, atol=2e-5, msg=name)


@pytest.mark.dist
@pytest.mark.parametrize("offload", ["none", "file"])
def test_16_bit_weights_resume_from_their_masters(tmp_path, source, offload):
    """What goes on from a checkpoint is the run that never stopped, bit for bit."""
    flags = {"data.source": source, "train.master_dtype": "float32", "model.dtype": "bfloat16"}
    flags |= {"plan.checkpoint_every": 2, "plan.offload": offload}
    mesh, specs = {"shard": 2}, (ZERO_1,)
    _, metrics = run_train(tmp_path / "whole", flags, mesh, specs)
    checkpoint = tmp_path / "whole" / "checkpoints" / "step-00000002"
    kept = Manifest.load(checkpoint).tensors
    assert any(name.startswith("optimizer.master.") for name in kept) == (offload == "file")
    _, rest = run_train(tmp_path / "rest", flags, mesh, specs, resume=str(checkpoint))
    assert values(rest, "step", "loss") == values(metrics, "step", "loss")[2:]
    first, second = exported(tmp_path / "whole"), exported(tmp_path / "rest")
    assert all(torch.equal(second[name], value) for name, value in first.items())

"""A run in stages that is stopped goes on, in stages or otherwise, as if nothing had happened."""

from __future__ import annotations

import os
import shutil
import signal

import pytest
import torch

from phalanx.engines.callbacks import Callback
from tests.engines.layout_cases import answers, exported, numbers
from tests.engines.train_cases import run_train
from tests.tiny_run import write_base, write_pairs

MEGATRON = {"family": "tensor", "name": "megatron"}
WAVE = {"family": "pipeline", "name": "hanayo", "waves": 1}
IN_STAGES = {"mesh": {"pp": 2}, "specs": (), "order": WAVE}


class StopAfter(Callback):
    """One rank, not the first, is told to stop."""

    def __init__(self, step):
        self.step = step

    def on_step(self, run):
        if (run.rank, run.step) == (1, self.step):
            os.kill(os.getpid(), signal.SIGTERM)


@pytest.mark.dist
def test_a_stopped_run_in_stages_goes_on_bit_for_bit_and_on_other_layouts(tmp_path):
    source = str(write_pairs(tmp_path / "pairs.jsonl"))
    base = str(write_base(tmp_path, num_layers=5, num_heads=4, num_kv_heads=2))
    flags = {"data.source": source, "train.method": "full", "model.name": base, "train.steps": 6}
    flags |= {"train.eval_every": 3, "train.keep_best": True, "plan.check_weights_every": 2}
    flags |= {"train.global_batch_tokens": 200}
    whole, expected = run_train(tmp_path / "whole", flags, **IN_STAGES)
    folder, copy = tmp_path / "parts", tmp_path / "copy"
    stopped, _ = run_train(folder, flags, callbacks=[StopAfter(3)], **IN_STAGES)
    assert stopped.stopped == "signal" and stopped.checkpoint and not stopped.export
    shutil.copytree(folder, copy)
    result, metrics = run_train(folder, flags, resume=True, **IN_STAGES)
    assert torch.equal(numbers(metrics), numbers(expected))
    assert answers(result) == answers(whole)
    weights, found = exported(tmp_path / "whole"), exported(folder)
    assert found.keys() == weights.keys()
    assert all(torch.equal(found[name], value) for name, value in weights.items())
    result, metrics = run_train(copy, flags, {"tp": 2}, (MEGATRON,), resume=True)
    torch.testing.assert_close(numbers(metrics), numbers(expected), rtol=1e-5, atol=0.0)
    assert answers(result) == answers(whole)

"""Numbers of a step reach the host without a wait for the next one."""

from __future__ import annotations

from types import SimpleNamespace

import torch
from torch._subclasses.fake_tensor import FakeTensorMode

from phalanx.engines.coming import Coming
from phalanx.engines.guard import Guard
from phalanx.engines.trainer_report import Held, RunReport
from phalanx.engines.trainer_step import StepOutcome, Work
from tests.engines.late_device import LateDevice


def test_values_of_the_host_are_there_at_once():
    value = torch.ones(2)
    (found,) = Coming([value]).arrived()
    assert found is value and Coming([]).arrived() == []


def test_values_of_a_device_are_waited_for_and_nothing_behind_them_is(monkeypatch):
    one, two, three = torch.tensor([1.0]), torch.tensor([2.0, 3.0]), torch.tensor([4.0])
    with monkeypatch.context() as patched:
        device = LateDevice(patched)
        first, second = Coming([one, two]), Coming([three])
        assert device.num_asked == 3 and not device.num_waits
        found = [each.tolist() for each in first.arrived()]
        assert device.num_waits == 1 and device.num_asked == 1
        found += [each.tolist() for each in second.arrived()]
    assert found == [[1.0], [2.0, 3.0], [4.0]]


def test_tensors_without_values_ask_nothing_of_a_device():
    with FakeTensorMode():
        value = torch.empty(3, device="cuda")
        assert Coming([value]).arrived()[0] is value


def test_a_run_on_a_gpu_reads_a_steps_numbers_while_the_next_one_is_under_way(
    monkeypatch, tmp_path
):
    """The host waits for what was copied behind the step, which leaves the next one's copies open:
    a plain `tolist` would wait until the device has nothing to do."""
    heard = []
    process = SimpleNamespace(rank=0, leads=True, world_size=1, device=torch.device("cuda"))
    guard = Guard(torch.device("cpu"), spike_factor=2.0)
    memory = SimpleNamespace(peak_so_far=lambda: 7)
    callbacks = SimpleNamespace(step=lambda _values: None, stop_reason="")
    report = RunReport(
        tmp_path, "job", process, memory, guard, callbacks, heard.append, num_steps=3
    )
    spans = SimpleNamespace(
        parts=lambda _origin_s: [(Work("O", -1), 1.0, 3.0)], action_rows=lambda _origin_s: []
    )
    batch = SimpleNamespace(
        next_sample=9, num_tokens_global=64, num_counted_global=8, micro_batches=[None]
    )
    before = SimpleNamespace(next_sample=4)
    with monkeypatch.context() as patched:
        device = LateDevice(patched)
        for number in range(3):
            norm = torch.tensor(float(number + 10))
            guard.skip(norm)
            sums = torch.tensor([float(number), 0.0, 0.0])
            report.hold(Held(number, batch, 0.1, StepOutcome(sums, norm, 0.5), spans, before))
            told = [(each["loss"], each["grad_norm"]) for each in heard]
            assert told == [(float(n), float(n + 10)) for n in range(number)]
            assert device.num_asked == 3, "of this step: its sums, its norm, what its guard said"
        report.read()
    report.metrics.close()
    assert [each["loss"] for each in heard] == [0.0, 1.0, 2.0] and device.num_asked == 0

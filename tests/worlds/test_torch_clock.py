"""Laws of moments: what a device's clock says after days of a run, with events that round as CUDA's
do (milliseconds between two of them as a float32)."""

from itertools import pairwise

import numpy as np
import pytest
import torch

from phalanx.worlds import torch_clock
from phalanx.worlds.torch_clock import DeviceClock

DAY_S = 86_400.0


class Device:
    """A device and a host that share one time, which passes when the test says so."""

    def __init__(self) -> None:
        self.now_s, self.num_waits, self.done_s = 5.0, 0, float("inf")

    def event(self, _device: torch.device, enable_timing: bool) -> "DeviceEvent":
        assert enable_timing, "events without timing cannot be compared"
        return DeviceEvent(self)


class DeviceEvent:
    def __init__(self, device: Device) -> None:
        self._device = device

    def record(self) -> None:
        self.at_s = self._device.now_s

    def query(self) -> bool:
        return self.at_s <= self._device.done_s

    def synchronize(self) -> None:
        self._device.num_waits += 1

    def elapsed_time(self, end: "DeviceEvent") -> float:
        return float(np.float32((end.at_s - self.at_s) * 1e3))


@pytest.fixture
def device(monkeypatch):
    found = Device()
    monkeypatch.setattr(torch.accelerator, "synchronize", lambda _device: None)
    monkeypatch.setattr(torch.cuda, "is_current_stream_capturing", lambda: False)
    monkeypatch.setattr(torch, "Event", found.event)
    monkeypatch.setattr(torch_clock, "perf_counter", lambda: found.now_s)
    return found


def test_moments_of_a_run_of_days_are_good_to_microseconds(device):
    clock, start_s = DeviceClock(torch.device("cuda", 0)), device.now_s
    worst_s = 0.0
    while device.now_s < start_s + 3 * DAY_S:
        device.now_s += 37.0 + 1e-4 * (device.now_s % 7.0)  # a step, at no round time
        moment, taken_s = clock.now(), device.now_s
        device.now_s += 0.0123456
        worst_s = max(worst_s, abs(clock.seconds(clock.now()) - device.now_s))
        worst_s = max(worst_s, abs(clock.seconds(moment) - taken_s))
    assert worst_s < 1e-3


def test_moments_read_late_stay_in_order_and_what_lay_between_them_is_kept(device):
    clock = DeviceClock(torch.device("cuda", 0))
    taken, moments = [], []
    for _ in range(500):  # hours of steps of which nobody has asked anything yet
        device.now_s += 29.7531
        taken.append(device.now_s)
        moments.append(clock.now())
    found = [clock.seconds(each) for each in moments]
    gaps = zip(pairwise(found), pairwise(taken))
    assert all(abs((b - a) - (d - c)) < 1e-5 for (a, b), (c, d) in gaps)


def test_taking_a_moment_waits_for_no_device_however_far_behind_it_is(device):
    clock = DeviceClock(torch.device("cuda", 0))
    device.done_s = device.now_s + 1.0
    for _ in range(20):
        device.now_s += 100.0
        clock.now()
    assert device.num_waits <= 1, "only for an event that had come"


def test_a_moment_of_the_cpu_is_the_hosts_time(device):
    clock = DeviceClock(torch.device("cpu"))
    assert clock.seconds(clock.now()) == device.now_s

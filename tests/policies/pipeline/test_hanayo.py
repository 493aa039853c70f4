"""Hanayo: the orders that the paper draws, its idle time and peaks in closed form, its Figure 9."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from phalanx.check import check_order
from phalanx.errors import JobError, PlanError
from phalanx.policies.pipeline.hanayo import Hanayo
from phalanx.registry import build
from phalanx.systems._published import published
from phalanx.worlds.pipeline_arrays import Played, play
from tests.order_strategies import simulate

DRAWN = [  # 4 ranks, 1 wave, 4 micro-batches; the stage follows from the place
    "F0 F1 F2 F3 F0 B0 F1 B1 F2 B2 F3 B3 B0 B1 B2 B3",
    "F0 F1 F2 F0 F3 F1 B0 F2 B1 F3 B2 B0 B3 B1 B2 B3",
    "F0 F1 F0 F2 F1 F3 F2 B0 F3 B1 B0 B2 B1 B3 B2 B3",
    "F0 F0 F1 F1 F2 F2 F3 F3 B0 B0 B1 B1 B2 B2 B3 B3",
]
# every p and W up to what a second plays, and the largest
SIZES = [(p, w) for p in range(2, 33) for w in range(1, 9) if p * w <= 48] + [(32, 8)]


def played(p: int, waves: int, m: int, t_f: float = 1.0, t_b: float = 2.0, p2p_s: float = 0.0):
    """The step, with the passes of a rank's whole share taking t_f and t_b."""
    lists = Hanayo(waves=waves).order(p, m)
    return play(lists, t_f / (2 * waves), t_b / (2 * waves), p2p_s)


def dapple(p: int, m: int, p2p_s: float = 0.0) -> Played:
    return play(build("pipeline", "1f1b").order(p, m), 1.0, 2.0, p2p_s)


def test_one_wave_on_four_ranks_is_the_order_drawn_in_the_paper():
    lists = build("pipeline", {"name": "hanayo", "waves": 1}).order(4, 4)
    assert [" ".join(f"{s.kind}{s.item}" for s in steps) for steps in lists] == DRAWN


def test_stages_walk_down_the_ranks_and_back_up():
    order = Hanayo(waves=2)
    assert order.rank_of_stage(3) == (0, 1, 2, 2, 1, 0, 0, 1, 2, 2, 1, 0)
    assert order.num_stages(3) == 12


def test_two_waves_on_eight_ranks_are_as_wide_as_figure_6():
    """124 forward passes of a stage: 96 of work and 28 idle, 22.6 %."""
    step = played(8, 2, 8, 4.0, 8.0)
    assert step.step_s[0] == 124.0
    assert step.idle_frac == pytest.approx(28 / 124)


def test_idle_time_is_p_minus_1_backward_passes_over_waves():
    for p, waves in SIZES:
        step = played(p, waves, p)
        assert step.step_s[0] == pytest.approx(3 * p + (p - 1) * 2 / waves, abs=1e-9), (p, waves)
        assert step.idle_frac == pytest.approx((2 * p - 2) / (3 * p * waves + 2 * p - 2))
        peaks = [(2 * waves - 1) * p + 1 + rank for rank in range(p)]
        assert step.peak_in_flight.tolist() == peaks, (p, waves)


@given(st.integers(2, 8), st.integers(1, 4), st.integers(1, 4), st.integers(0, 4))
def test_idle_time_holds_for_other_passes_than_the_list_is_made_for(p, waves, t_f, longer):
    step = played(p, waves, p, t_f, t_f + longer)
    assert step.step_s[0] == pytest.approx(
        p * (2 * t_f + longer) + (p - 1) * (t_f + longer) / waves
    )


@pytest.mark.parametrize(("p", "waves"), [(4, 1), (4, 2), (8, 2)])
def test_more_micro_batches_add_idle_time(p, waves):
    """2p - 3 forward passes of a stage for each further p micro-batches."""
    idle = [played(p, waves, k * p).step_s[0] - 3 * k * p for k in (1, 2, 3)]
    more = (2 * p - 3) / (2 * waves)
    assert idle == pytest.approx([idle[0], idle[0] + more, idle[0] + 2 * more])


@given(st.integers(1, 5), st.integers(1, 3), st.integers(1, 11))
def test_each_pass_comes_once_and_after_its_inputs(p, waves, m):
    order = Hanayo(waves=waves)
    check_order(order.order(p, m), order.num_stages(p), m, order.rank_of_stage(p))


@given(st.integers(2, 5), st.integers(1, 3), st.integers(1, 9))
def test_a_micro_batch_changes_ranks_2_waves_p_minus_1_times(p, waves, m):
    wired = played(p, waves, m).wired
    sends = [row.step.kind for row in wired.rows if row.sends]
    assert sends.count("F") == sends.count("B") == 2 * waves * (p - 1) * m


def test_the_simulated_world_agrees_on_time_and_memory():
    step_s, peaks = simulate(Hanayo(waves=2), 4, 4, {"F": 1, "B": 2})
    assert step_s == 4 * 4 * 3 + 3 * 4
    assert peaks == [13, 14, 15, 16]


@pytest.mark.parametrize(("devices", "percent"), [(8, 33.3), (32, 38.5)])
def test_one_wave_on_half_the_devices_has_the_bubble_of_chimera(devices, percent):
    half = devices // 2
    assert 100 * played(half, 1, half).idle_frac == pytest.approx(percent, abs=0.05)


def test_gains_over_1f1b_are_those_measured_in_figure_9():
    """4 ranks, transfers free; within 10 % of both machines whose links are fast, and in order."""
    base = dapple(4, 4).step_s[0]
    gains = {waves: base / played(4, waves, 4).step_s[0] for waves in (2, 4, 8)}
    assert list(gains.values()) == pytest.approx([1.4, 1.556, 1.647], abs=1e-3)
    rates = throughputs("D=2;P=4")
    for machine in ("A100-80GB, NVLink in pairs", "A100-80GB, full NVLink"):
        for waves, gain in gains.items():
            measured = rates[machine, f"hanayo W={waves}"] / rates[machine, "dapple"]
            assert gain == pytest.approx(measured, rel=0.10)


def throughputs(configuration: str) -> dict[tuple[str, str], float]:
    """(machine, method) -> sequences per second of Figure 9."""
    found = {}
    for row in published("hanayo"):
        place, _, method = row.configuration.partition(";method=")
        if row.metric == "throughput" and place == configuration and row.number is not None:
            found[row.hardware, method] = row.number
    return found


def test_the_best_number_of_waves_never_grows_with_the_time_of_a_message():
    best = []
    for p2p_s in (0.0, 0.02, 0.05, 0.1, 0.2, 0.4):
        seconds = {waves: played(8, waves, 8, p2p_s=p2p_s).step_s[0] for waves in (1, 2, 4, 8)}
        best.append(min(seconds, key=seconds.__getitem__))
    assert best == sorted(best, reverse=True)
    assert best[0] == 8 and best[2] in (2, 4), "slow links take the optimum to 2 to 4 waves"


@pytest.mark.parametrize("size", [(0, 4), (2, 0)])
def test_refuses_sizes_without_a_schedule(size):
    with pytest.raises(PlanError, match="at least 1") as caught:
        Hanayo().order(*size)
    assert caught.value.code == "order/illegal"


def test_refuses_no_waves():
    with pytest.raises(JobError, match="waves = 0: must be at least 1"):
        build("pipeline", {"name": "hanayo", "waves": 0})

"""What the guard decides, from norms alone, and what the host hears of it."""

from __future__ import annotations

import json
from statistics import median, median_low

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch._subclasses.fake_tensor import FakeTensorMode

from phalanx.engines.guard import LEAST_NORMS, MOST_SKIPS, WINDOW, Guard
from phalanx.errors import WorldError

CPU = torch.device("cpu")
NAN, INF = float("nan"), float("inf")


def guard(**settings):
    return Guard(CPU, **settings)


def decide(guard, norm, step=0, loss=1.0):
    """(whether the step is skipped, what the host hears)."""
    skips = bool(guard.skip(torch.tensor(norm)).item())
    return skips, guard.hear(step, loss, norm, range(40, 43))


@pytest.mark.parametrize("norm", [NAN, INF])
def test_stop_skips_the_step_and_names_it_and_its_samples(norm):
    each = guard()
    assert decide(each, 1.0) == (False, "")
    assert each.skip(torch.tensor(norm)).item() == 1.0
    with pytest.raises(WorldError, match=r"step 7 .* samples 40 to 42.*weights are those") as info:
        each.hear(6, 2.0, norm, range(40, 43))
    assert info.value.code == "train/nonfinite"


def test_steps_after_the_one_that_ends_the_run_change_nothing():
    each = guard()
    skips = [each.skip(torch.tensor(norm)).item() for norm in (1.0, NAN, 1.0, 2.0)]
    assert skips == [0.0, 1.0, 1.0, 1.0]


def test_skip_counts_and_goes_on():
    each = guard(on_nonfinite="skip")
    heard = [decide(each, norm, step) for step, norm in enumerate([1.0, NAN, 1.0, INF, 1.0])]
    assert [skips for skips, _ in heard] == [False, True, False, True, False]
    assert "step 2" in heard[1][1] and "1 so far" in heard[1][1]
    assert "step 4" in heard[3][1] and "2 so far" in heard[3][1]
    assert heard[4][1] == ""


def test_a_run_of_skips_ends_the_run_and_an_interrupted_one_does_not():
    each = guard(on_nonfinite="skip")
    for norm in [NAN] * (MOST_SKIPS - 1) + [1.0] + [NAN] * (MOST_SKIPS - 1):
        decide(each, norm)
    with pytest.raises(WorldError, match=f"{MOST_SKIPS} steps in a row"):
        decide(each, NAN)


def test_spike_is_relative_to_the_median():
    each = guard(spike_factor=3.0, on_spike="skip")
    for at in range(LEAST_NORMS):
        assert decide(each, 2.0 + 0.1 * at) == (False, "")
    usual = median(2.0 + 0.1 * at for at in range(LEAST_NORMS))
    assert decide(each, 0.99 * 3.0 * (usual - 0.05))[0] is False  # torch takes the lower middle
    skips, heard = decide(each, 3.01 * (usual + 0.05))
    assert skips and "spike" in heard and "times the median" in heard


def test_no_spike_before_norms_are_known():
    each = guard(spike_factor=2.0, on_spike="stop")
    for at in range(LEAST_NORMS):
        assert decide(each, 10.0**at) == (False, "")


def test_warned_spike_is_taken():
    each = guard(spike_factor=2.0)
    for _ in range(LEAST_NORMS):
        decide(each, 1.0)
    skips, heard = decide(each, 50.0, step=8)
    assert not skips and "step 9" in heard and "50 times the median" in heard and "taken" in heard


def test_spike_ends_the_run_where_asked():
    each = guard(spike_factor=2.0, on_spike="stop")
    for _ in range(LEAST_NORMS):
        decide(each, 1.0)
    with pytest.raises(WorldError, match=r"gradient norm 2\.5 \(2\.5 times the median\)") as info:
        decide(each, 2.5)
    assert info.value.code == "train/spike"


def test_old_norms_leave_the_median():
    each = guard(spike_factor=2.0, on_spike="skip")
    for _ in range(WINDOW):
        decide(each, 1.0)
    for _ in range(WINDOW // 2 + 1):
        assert decide(each, 1.9)[0] is False
    assert decide(each, 3.7)[0] is False


def test_skipped_norms_do_not_move_the_median():
    each = guard(spike_factor=2.0, on_spike="skip")
    for _ in range(LEAST_NORMS):
        decide(each, 1.0)
    assert all(decide(each, 9.0)[0] for _ in range(MOST_SKIPS - 1))
    assert decide(each, 1.9) == (False, "")


def test_loss_without_a_value_but_finite_gradients_is_an_error():
    with pytest.raises(WorldError, match="its gradients are"):
        decide(guard(on_nonfinite="skip"), 1.0, loss=NAN)


def test_the_host_may_listen_a_step_late():
    each = guard(on_nonfinite="skip")
    each.skip(torch.tensor(NAN))
    each.skip(torch.tensor(1.0))
    assert "step 1" in each.hear(0, 1.0, NAN, range(2))
    assert each.hear(1, 1.0, 1.0, range(2, 4)) == ""


norms = st.lists(st.sampled_from([1.0, 1.5, 2.5, 7.0, NAN, INF]), max_size=90)


@given(before=norms, after=norms)
def test_a_resumed_run_decides_as_an_uninterrupted_one(before, after):
    settings = {"on_nonfinite": "skip", "spike_factor": 2.0, "on_spike": "skip"}
    whole, first = guard(**settings), guard(**settings)
    for norm in before:
        whole.skip(torch.tensor(norm))
        first.skip(torch.tensor(norm))
    state = json.loads(json.dumps(first.state()))
    if state["counts"][3]:  # it had ended
        return
    second = guard(**settings)
    second.restore(state)
    for norm in after:
        assert second.skip(torch.tensor(norm)).item() == whole.skip(torch.tensor(norm)).item()
    assert json.dumps(second.state()) == json.dumps(whole.state())


def test_a_run_that_had_ended_may_try_again():
    ended = guard()
    ended.skip(torch.tensor(NAN))
    again = guard()
    again.restore(json.loads(json.dumps(ended.state())))
    assert decide(again, 1.0) == (False, "")


@given(norms=st.lists(st.floats(0.5, 1.5), max_size=WINDOW + 20))
def test_the_median_is_that_of_the_last_norms(norms):
    each = guard(spike_factor=1e9, on_spike="skip")
    for norm in norms:
        each.skip(torch.tensor(norm))
    each.skip(torch.tensor(NAN))
    *_, found = each._unheard[-1].arrived()[0].tolist()
    last = [torch.tensor(norm).item() for norm in norms[-WINDOW:]]  # as float32 holds them
    assert found == median_low(last) if last else found != found


def test_nothing_is_read_back_from_a_cuda_device():
    """Fake tensors have no values: whatever asked for one would fail."""
    with FakeTensorMode():
        each = Guard(torch.device("cuda"), on_nonfinite="skip", spike_factor=2.0, on_spike="stop")
        for _ in range(3):
            skip = each.skip(torch.ones((), device="cuda"))
    assert skip.device.type == "cuda" and skip.dtype is torch.float32 and skip.shape == ()


def test_skipped_update_changes_neither_weights_nor_moments_nor_counters():
    weight = torch.nn.Parameter(torch.ones(5))
    adamw = torch.optim.AdamW([weight], lr=0.1, fused=True)
    each = guard(on_nonfinite="skip")
    for grad in (1.0, NAN, 2.0):
        weight.grad = torch.full((5,), grad)
        adamw.found_inf = each.skip(weight.grad.norm())
        adamw.step()
    expected = torch.nn.Parameter(torch.ones(5))
    other = torch.optim.AdamW([expected], lr=0.1, fused=True)
    for grad in (1.0, 2.0):
        expected.grad = torch.full((5,), grad)
        other.step()
    assert torch.equal(weight, expected)
    assert adamw.state[weight]["step"] == other.state[expected]["step"]

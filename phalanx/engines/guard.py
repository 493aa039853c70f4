"""Steps that must not count: gradients that are not finite, and spikes of the gradient norm.

The decision acts on the very step. It is computed on the device from the global gradient norm,
which is the same on all ranks, so no rank waits and no value is read back before the update; the
host hears of it when it reads the numbers of the step, one step late:

    skip = guard.skip(optimizer.norm())            # on the device: 1.0 or 0.0
    optimizer.step(lr, skip=skip)                  # 1.0: weights, moments and counters stay
    ...                                            # the next step is under way
    warning = guard.hear(step, loss, norm, samples)    # a line to show, "", or the end of the run

Once a step ends the run, all later ones are skipped too: when the host hears of it, the weights are
still those before that step, and a checkpoint saved then is good.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Mapping
from typing import Any, NamedTuple

import torch
from torch import Tensor

from phalanx.engines.coming import Coming
from phalanx.errors import WorldError

WINDOW = 64  # accepted norms that the median is taken of
LEAST_NORMS = 8  # fewer say nothing about what is usual
MOST_SKIPS = 10  # skipped steps in a row that end the run

_FINE, _NONFINITE, _SPIKE = 0, 1, 2


class Guard:
    """Decides about steps and tells what it decided.

    A spike is a norm above `spike_factor` times the median of the last 64 norms of steps that were
    taken; with fewer than 8 of them nothing is one. Skipped steps do not enter the median. Ten
    skipped steps in a row end the run: the model or the data have changed for good.

    Args:
        device: where norms are.
        on_nonfinite: "stop" or "skip" a step whose norm is infinite or no number.
        spike_factor: 0: nothing is a spike.
        on_spike: "warn" (take the step), "skip" or "stop".
    """

    def __init__(
        self,
        device: torch.device,
        *,
        on_nonfinite: str = "stop",
        spike_factor: float = 0.0,
        on_spike: str = "warn",
    ) -> None:
        self.spike_factor = spike_factor
        self._on_nonfinite, self._on_spike = on_nonfinite, on_spike
        self._norms = torch.full((WINDOW,), torch.nan, dtype=torch.float64, device=device)
        # taken steps, skipped ones, skipped in a row, whether the run has ended
        self._counts = torch.zeros(4, dtype=torch.int64, device=device)
        self._unheard: deque[Coming] = deque()

    def skip(self, norm: Tensor) -> Tensor:
        """Whether the step with this gradient norm must change nothing: float32, 1.0 or 0.0.

        Nothing is read back from the device. Call it once per step, before the update, and `hear`
        once per step in the same order.

        Args:
            norm: global, before clipping; equal on all ranks.
        """
        wide = norm.detach().to(torch.float64).reshape(())
        taken, skipped, in_row, ended = self._counts.unbind()
        median = self._median(taken)
        is_finite = (wide - wide) == 0.0
        is_bad = is_finite.logical_not()
        is_spike = torch.zeros_like(is_bad)
        if self.spike_factor > 0.0:
            is_known = taken >= LEAST_NORMS
            is_spike = is_finite & is_known & (wide > self.spike_factor * median)
        kind = torch.where(is_bad, _NONFINITE, torch.where(is_spike, _SPIKE, _FINE))
        skips = is_bad | (is_spike if self._on_spike != "warn" else torch.zeros_like(is_bad))
        ends = is_bad if self._on_nonfinite == "stop" else torch.zeros_like(is_bad)
        if self._on_spike == "stop":
            ends = ends | is_spike
        in_row = (in_row + 1) * skips
        ends = ends | (in_row >= MOST_SKIPS)
        skips = skips | (ended > 0)
        self._remember(wide, taken, skips)
        counts = [taken + skips.logical_not(), skipped + skips, in_row, (ended > 0) | ends]
        self._counts = torch.stack([each.to(torch.int64) for each in counts])
        self._unheard.append(Coming([torch.stack([*self._counts, kind, median]).double()]))
        return skips.to(torch.float32)

    def _median(self, taken: Tensor) -> Tensor:
        """Of the norms so far, the lower one of two; torch's own nanmedian waits for the device."""
        middle = (taken.clamp(max=WINDOW) - 1).clamp(min=0) // 2
        ordered = self._norms.sort().values  # what is not there yet is NaN, which comes last
        return ordered.gather(0, middle.reshape(1)).reshape(())

    def _remember(self, norm: Tensor, taken: Tensor, skips: Tensor) -> None:
        """Write the norm of a step that is taken over the oldest."""
        place = (taken % WINDOW).reshape(1)
        kept = torch.where(skips, self._norms.gather(0, place), norm.reshape(1))
        self._norms = self._norms.scatter(0, place, kept)

    def hear(self, step: int, loss: float, grad_norm: float, samples: range) -> str:
        """What became of the oldest step not heard of yet: a warning, or "" when all is well.

        Args:
            step: its number, from 0.
            loss, grad_norm: its numbers, read from the device.
            samples: global counters of its samples, the same on all ranks.

        Raises:
            WorldError: `train/nonfinite` or `train/spike` when the run has to end; it names the
                step, counted from 1, and the samples.
        """
        (numbers,) = self._unheard.popleft().arrived()
        said = _Said(*numbers.tolist())
        story = _Story(step, loss, grad_norm, samples, said)
        if said.kind == _FINE:
            return story.check_loss()
        if said.ended:
            story.end_run(self._on_nonfinite, self._on_spike)
        return story.warning(taken=said.kind == _SPIKE and self._on_spike == "warn")

    def state(self) -> dict[str, Any]:
        """All that later decisions depend on, for a checkpoint; JSON. Waits for the device."""
        norms = [None if norm != norm else norm for norm in self._norms.tolist()]
        return {"norms": norms, "counts": self._counts.tolist()}

    def restore(self, state: Mapping[str, Any]) -> None:
        """Go on from `state()`; a run that had ended may try again."""
        device = self._norms.device
        norms = [torch.nan if norm is None else norm for norm in state["norms"]]
        taken, skipped, _, _ = state["counts"]
        self._norms = torch.tensor(norms, dtype=torch.float64, device=device)
        in_row = 0 if state["counts"][3] else state["counts"][2]
        self._counts = torch.tensor([taken, skipped, in_row, 0], dtype=torch.int64, device=device)


class _Said(NamedTuple):
    """The device's numbers about a step."""

    taken: float
    skipped: float
    in_row: float
    ended: float
    kind: float
    median: float


class _Story(NamedTuple):
    """A step as a message tells it."""

    step: int
    loss: float
    grad_norm: float
    samples: range
    said: _Said

    @property
    def name(self) -> str:
        return f"step {self.step + 1}"

    @property
    def value(self) -> str:
        text = f"loss {self.loss:.6g}, gradient norm {self.grad_norm:.6g}"
        if self.said.kind == _SPIKE:
            text += f" ({self.grad_norm / self.said.median:.3g} times the median)"
        return f"{text}, samples {self.samples.start} to {self.samples.stop - 1}"

    @property
    def code(self) -> str:
        return "train/spike" if self.said.kind == _SPIKE else "train/nonfinite"

    def check_loss(self) -> str:
        """A loss that is no number although the gradients are comes from the loss function."""
        if self.loss - self.loss == 0.0:
            return ""
        rule = "the loss is not finite although its gradients are; look at train.loss"
        raise WorldError("train/nonfinite", self.name, self.value, rule)

    def end_run(self, on_nonfinite: str, on_spike: str) -> None:
        if self.said.in_row >= MOST_SKIPS:
            rule, key = f"{self.said.in_row:.0f} steps in a row were skipped", ""
        elif self.said.kind == _SPIKE:
            rule, key = "is a spike; look at these samples", " or train.on_spike"
        else:
            rule, key = "is not finite; look at these samples", " or train.on_nonfinite"
        rule += f"; a new run may set a lower train.lr{key}; the weights are those before it"
        raise WorldError(self.code, self.name, self.value, rule)

    def warning(self, *, taken: bool) -> str:
        what = "a spike" if self.said.kind == _SPIKE else "not finite"
        did = "was taken all the same" if taken else f"was skipped ({self.said.skipped:.0f} so far)"
        return f"{self.name} = {self.value}: is {what} and {did}"

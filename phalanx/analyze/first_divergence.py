"""Where two runs part: the first step, phase and layer whose summaries differ, and by how much.

Runs record summaries of activations, gradients and weights (`engines.fingerprint`) that add up over
ranks, so runs on different layouts can be compared: summaries of all ranks of a run are merged
first. Equal bits are told exactly. How far two tensors a and b are apart follows from K random
projections with signs: the mean of (s_k·a - s_k·b)^2 has the expectation |a - b|^2. Signs are those
of the row times those of the column, so its relative standard deviation is sqrt(2 / K) for a
difference of many directions, and at most sqrt(8 / K), for one of a single direction (rank one).
"""

from __future__ import annotations

import json
import math
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from phalanx.errors import JobError, PlanError

FOLDER, FORMAT_VERSION = "fingerprints", 1
# In the order of a step: weights before it, forward, gradients of activations, of weights.
PHASES = {"W": "weights", "F": "forward", "B": "backward", "G": "gradient"}
# Above this, rounding in another order does not explain a difference in one step.
TOLERANCE = {"float64": 1e-9, "float32": 1e-4, "bfloat16": 5e-2}
_WRAP = 1 << 64
Place = tuple[int, str, str]  # step, phase, name


@dataclass(frozen=True)
class Summary:
    """What is kept of a tensor, added up over ranks and micro-batches.

    Attributes:
        count: elements.
        squares: sum of squares.
        signs: random projections.
        bits: a hash of all elements with their places, modulo 2^64.
    """

    count: int
    squares: float
    signs: tuple[float, ...]
    bits: int

    def __add__(self, other: Summary) -> Summary:
        signs = tuple(one + two for one, two in zip(self.signs, other.signs))
        bits = (self.bits + other.bits) % _WRAP
        return Summary(self.count + other.count, self.squares + other.squares, signs, bits)

    @property
    def norm(self) -> float:
        """The 2-norm."""
        return math.sqrt(self.squares)

    def distance(self, other: Summary) -> float:
        """The norm of the difference, estimated, over the larger norm; 0 where bits are equal.

        Infinite where the numbers of elements differ, or one has elements that are not finite.
        """
        if self.bits == other.bits and self.count == other.count:
            return 0.0
        norms = (self.norm, other.norm)
        if self.count != other.count or not all(map(math.isfinite, norms)):
            return math.inf
        whole = max(norms)
        apart = [(one - two) ** 2 for one, two in zip(self.signs, other.signs)]
        return math.sqrt(sum(apart) / len(apart)) / whole if whole else 0.0


@dataclass(frozen=True)
class Recorded:
    """The summaries of a run.

    Attributes:
        places: in the order in which they were computed.
        dtype: that computed.
        threads: of each process.
    """

    folder: str
    dtype: str
    places: Mapping[Place, Summary]
    threads: int = 1


@dataclass(frozen=True)
class Difference:
    """A place where two runs differ.

    Attributes:
        step, phase, name: the step from 1, a key of `PHASES`, a layer or a weight.
        distance: relative, estimated; infinite for other numbers of elements, or not finite ones.
        norms: of both.
        counts: elements of both.
    """

    step: int
    phase: str
    name: str
    distance: float
    norms: tuple[float, float]
    counts: tuple[int, int]


@dataclass(frozen=True)
class Divergence:
    """What a comparison found.

    Attributes:
        differences: all places that are not equal bit for bit, in the order of computation.
        num_places: compared.
        tolerance: relative distance that rounding may explain.
        weight_tolerance: the same of weights that an optimizer has changed, and of gradients that
            follow from them.
        only: names that one of the runs lacks in a phase altogether.
    """

    differences: tuple[Difference, ...]
    num_places: int
    tolerance: float
    weight_tolerance: float
    only: tuple[str, ...]

    @property
    def first(self) -> Difference | None:
        """The first place that differs at all."""
        return next(iter(self.differences), None)

    @property
    def is_rounding(self) -> bool:
        """Whether rounding explains all of it: nothing large, and nothing that one run lacks."""
        return self.first_large is None and not self.only

    @property
    def first_large(self) -> Difference | None:
        """The first place that differs by more than rounding may explain."""
        return next((each for each in self.differences if self._is_large(each)), None)

    def _is_large(self, each: Difference) -> bool:
        has_changed = each.phase in "WG" and each.step > 1
        return each.distance > (self.weight_tolerance if has_changed else self.tolerance)


def read_recorded(folder: str | Path) -> Recorded:
    """The summaries of a run folder, merged over its ranks.

    Raises:
        JobError: `job/not-found` for a folder without a recording, `job/syntax` for a damaged one.
    """
    files = sorted((Path(folder) / FOLDER).glob("rank*.jsonl"))
    if not files:
        rule = "holds no recording; run with --plan.record_steps 2"
        raise JobError("job/not-found", "run folder", folder, rule)
    places: dict[Place, Summary] = {}
    dtype, threads = "", 1
    for file in files:
        try:
            head, *lines = (json.loads(line) for line in file.read_text().splitlines())
            _require_format(head, file)
            dtype, threads = head["dtype"], int(head["threads"])
            for line in lines:
                place, summary = _of_line(line)
                places[place] = places[place] + summary if place in places else summary
        except (ValueError, KeyError, TypeError) as error:
            rule = f"is not what Phalanx wrote: {type(error).__name__}: {error}"
            raise JobError("job/syntax", str(file), None, rule) from None
    ordered = dict(sorted(places.items(), key=lambda each: _order(each[0])))
    return Recorded(str(folder), dtype, ordered, threads)


def _require_format(head: Mapping[str, Any], file: Path) -> None:
    if head["format_version"] != FORMAT_VERSION:
        rule = "this version of Phalanx reads another format; record the run again"
        where = f"{file}: format_version"
        raise PlanError("plan/format", where, head["format_version"], rule, legal=[FORMAT_VERSION])


def _of_line(line: Mapping[str, Any]) -> tuple[Place, Summary]:
    place = (int(line["step"]), str(line["phase"]), str(line["name"]))
    if place[1] not in PHASES:
        raise ValueError(f"phase {place[1]}")
    signs = tuple(map(float, line["signs"]))
    bits = int(line["bits"]) % _WRAP
    return place, Summary(int(line["count"]), float(line["squares"]), signs, bits)


def _order(place: Place) -> tuple:
    """Forward along the model, backward against it; weights of a layer by name."""
    step, phase, name = place
    words = name.split(".")
    numbers = [int(word) for word in words if word.isdigit()]
    ends = ("norm", "lm_head")
    depth = numbers[0] if numbers else (-1 if not any(e in words for e in ends) else 1 << 30)
    late = words[0] == "lm_head"
    along = (depth, late) if phase in "WF" else (-depth, not late)
    return step, list(PHASES).index(phase), along, name


def compare(one: Recorded, other: Recorded, tolerance: float = 0.0) -> Divergence:
    """Compare two recordings place by place.

    Args:
        tolerance: relative distance that rounding may explain; 0: by the dtype that computed, of
            two the coarser, and of weights and their gradients behind an update its root: Adam
            divides by the size of the gradient, so that small gradients, which rounding changes
            most, count as much as large ones; a weight that began as zero (LoRA's B) is nothing
            but its updates, and the gradient of its partner (A) is made by it.

    Raises:
        PlanError: `trace/runs` where they have no step in common.
    """
    shared = [place for place in one.places if place in other.places]
    if not shared:
        steps = [sorted({place[0] for place in run.places}) for run in (one, other)]
        rule = f"no step in common: {steps[0]} here, {steps[1]} there"
        raise PlanError("trace/runs", "runs", f"{one.folder}, {other.folder}", rule)
    differences = tuple(_differences(one, other, shared))
    mine, theirs = ({place[1:] for place in run.places} for run in (one, other))
    lone = {name for _, name in mine ^ theirs}
    allowed = tolerance or max(TOLERANCE.get(run.dtype, 0.0) for run in (one, other))
    of_weights = tolerance or math.sqrt(allowed)
    return Divergence(differences, len(shared), allowed, of_weights, tuple(sorted(lone)))


def _differences(one: Recorded, other: Recorded, places: list[Place]) -> Iterator[Difference]:
    for place in places:
        mine, theirs = one.places[place], other.places[place]
        distance = mine.distance(theirs)
        if distance > 0.0 or mine.bits != theirs.bits:
            norms, counts = (mine.norm, theirs.norm), (mine.count, theirs.count)
            yield Difference(*place, distance, norms, counts)

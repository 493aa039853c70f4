"""A mixed cluster planned part by part: data parallelism over parts, each with a plan of its own.

Every part holds the model and takes a share of the batch that it finishes when the others do;
gradients are summed between parts over the slowest link. Symbols: T_i seconds of part i for its
rows, G bytes of gradients, P parts, b and l rate and latency of the slowest link.

    step = max_i T_i + 2 (P - 1) / P * G / b + 2 (P - 1) l        (ring over parts, not hidden)

The bar's low end hides the exchange behind the backward pass. Differences from one plan for all
(`MixedCluster.as_one`): fast parts do not wait for slow ones, and traffic inside a part does not
cross the slow link. Rows are shares of tokens; `phalanx train` gives every rank as many, so these
plans are prices to compare with.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from math import gcd, inf
from typing import Any

from phalanx.cost.bars import Bar
from phalanx.models.config import DTYPE_BYTES
from phalanx.models.spec import lora_tensors
from phalanx.planner.answers import Answer
from phalanx.planner.clusters import AskedCluster
from phalanx.planner.search import answer
from phalanx.planner.training import Training

_ROUNDS = 3  # of shares by the times of the round before
_FEWEST_UNITS = 4  # of rows, on the mean part


@dataclass(frozen=True)
class PartsAnswer:
    """What a mixed cluster does with a plan for each part.

    Attributes:
        answers: of each part that takes rows, on its share of the batch.
        shares: of the batch's tokens, as `answers`.
        left_out: parts that cannot hold the model, as the user would name them.
        sync_s: of gradients between parts.
        num_steps: of the whole job.
        usd_per_h: of the parts that take rows; infinite where a price is not known.
    """

    answers: Sequence[Answer]
    shares: Sequence[float]
    left_out: Sequence[str]
    sync_s: float
    num_steps: int
    usd_per_h: float

    @property
    def step_s(self) -> Bar:
        """Of a step, gradients between parts included."""
        expected, least, most = (max(each) for each in zip(*(a.step_s for a in self.answers)))
        return Bar(expected + self.sync_s, least, most + self.sync_s)

    @property
    def hours(self) -> Bar:
        """Of the whole job."""
        return self.step_s * (self.num_steps / 3600.0)

    @property
    def dollars(self) -> Bar:
        """Of the whole job; infinite where a price is not known."""
        return self.hours * self.usd_per_h

    def describe(self, one: Answer | None = None) -> list[str]:
        """Lines for a reader; the first compares with one plan for all devices."""
        step = self.step_s
        text = (
            f"a plan for each part: {step.value:.3g} s a step ({step.low:.3g} to {step.high:.3g})"
        )
        if one is not None and one.best is not None:
            text += f", {one.step_s[0] / step.value:.2g} times as fast as one plan for all"
        lines = [f"{text}; gradients between parts {self.sync_s:.2g} s [simulated only]"]
        for each, share in zip(self.answers, self.shares):
            assert each.best is not None
            lines.append(f"{each.asked.text}, {share:.0%} of a batch: {each.best.sized.describe()}")
        lines += [f"{name}: cannot hold the model, left out" for name in self.left_out]
        return lines

    def to_dict(self) -> dict[str, Any]:
        """For JSON; bars as [expected, least, most]."""
        parts = [
            {"share": share} | each.to_dict() for each, share in zip(self.answers, self.shares)
        ]
        return {
            "parts": parts,
            "left_out": list(self.left_out),
            "sync_s": self.sync_s,
            "step_s": list(self.step_s),
            "hours": list(self.hours),
            "dollars": list(self.dollars) if self.usd_per_h < inf else None,
        }


def by_parts(
    training: Training,
    asked: AskedCluster,
    *,
    limit_bytes: float = 0.0,
    minimise: str = "time",
) -> PartsAnswer | None:
    """Plan each part of a mixed cluster for itself.

    Args:
        limit_bytes: of a rank (0: what its device leaves).
        minimise: as `search.answer`.

    Returns:
        None for a cluster of one kind, and where fewer than two parts can take rows.
    """
    if asked.mixed is None or training.rows.most_ranks < len(asked.mixed.parts):
        return None
    options: dict[str, Any] = {"limit_bytes": limit_bytes, "minimise": minimise}
    sites = asked.mixed.sites
    names = [
        f"{part} at {site}" if len(set(sites)) > 1 else str(part)
        for part, site in zip(asked.mixed.parts, sites)
    ]
    parts = [AskedCluster(name, part) for name, part in zip(names, asked.mixed.parts)]
    alone = [answer(training, part, **options) for part in parts]
    taking = [at for at, each in enumerate(alone) if each.best is not None]
    if len(taking) < 2:
        return None
    links = [asked.mixed.link_between(i, j) for i in taking for j in taking if i < j]
    found = _shared(training, [alone[at] for at in taking], options)
    if found is None:
        return None
    answers, shares = found
    num_parts = len(taking)
    gradient_bytes = num_trained(training) * DTYPE_BYTES[training.master_dtype]
    sync_s = (
        2
        * (num_parts - 1)
        * (
            gradient_bytes / num_parts / min(link.bytes_per_s for link in links)
            + max(link.latency_s for link in links)
        )
    )
    return PartsAnswer(
        answers=answers,
        shares=shares,
        left_out=[names[at] for at in range(len(parts)) if at not in taking],
        sync_s=sync_s,
        num_steps=training.num_steps,
        usd_per_h=sum(
            each.asked.cluster.num_devices * each.asked.cluster.machine.usd_per_h
            for each in answers
        ),
    )


def num_trained(training: Training) -> int:
    """Elements that get a gradient."""
    lora, config, shape = training.lora, training.config, training.shape
    if lora is None:
        return shape.num_params
    if config is not None:
        return sum(each.num_elements for each in lora_tensors(config, lora).values())
    return sum(
        layer.count * lora.rank * (product.inputs + product.outputs) * product.copies
        for layer in shape.layers
        for product in layer.adapted(shape.hidden, training.lora_targets or "all")
    )


def _shared(
    training: Training, alone: Sequence[Answer], options: dict[str, Any]
) -> tuple[Sequence[Answer], Sequence[float]] | None:
    """The best of a few rounds, in which shares follow the speeds of the round before."""
    tokens = [float(training.batch_tokens)] * len(alone)
    answers, best = alone, None
    for _ in range(_ROUNDS):
        tokens = _next_tokens(training, answers, tokens)
        answers = [
            answer(_share_of(training, part), each.asked, **options)
            for part, each in zip(tokens, answers)
        ]
        if any(each.best is None for each in answers):
            break
        slowest = max(each.step_s[0] for each in answers)
        if best is None or slowest < best[0]:
            best = slowest, answers, [part / sum(tokens) for part in tokens]
    return best[1:] if best else None


def _next_tokens(
    training: Training, answers: Sequence[Answer], tokens: Sequence[float]
) -> list[float]:
    """Tokens of each part by its speed; whole rows where rows have one length."""
    speeds = [part / each.step_s[0] for part, each in zip(tokens, answers)]
    shares = [training.batch_tokens * speed / sum(speeds) for speed in speeds]
    if training.profile is not None:
        return [float(max(1, round(share))) for share in shares]
    rows = training.batch_tokens // training.seq_tokens
    # rows that divide among ranks: in units that the batch and the largest part have in common
    most = max(each.asked.cluster.num_devices for each in answers)
    unit = gcd(rows, 1 << (most.bit_length() - 1))
    while unit > 1 and rows // unit < _FEWEST_UNITS * len(answers):
        unit //= 2
    counts = whole_shares(shares, rows // unit)
    return [float(count * unit * training.seq_tokens) for count in counts]


def whole_shares(shares: Sequence[float], total: int) -> list[int]:
    """Whole numbers that sum to `total`, as near to the shares as each having at least one allows.

    Args:
        total: at least as many as there are shares.
    """
    free = total - len(shares)
    wanted = [free * share / sum(shares) for share in shares]
    counts = [int(each) for each in wanted]
    by_rest = sorted(range(len(shares)), key=lambda at: counts[at] - wanted[at])
    for at in by_rest[: free - sum(counts)]:
        counts[at] += 1
    return [1 + count for count in counts]


def _share_of(training: Training, tokens: float) -> Training:
    return replace(training, batch_tokens=int(tokens))

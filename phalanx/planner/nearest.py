"""What is nearest to a training job that does not fit: each answer is computed, and fits.

The order is that of what it costs the user: the same devices with other work, then more devices of
the same kind, then the cheapest other machine.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from dataclasses import dataclass, replace
from typing import Any

import numpy as np

from phalanx.hardware import Cluster, machine_names, read_machine
from phalanx.layout.placement import divisors
from phalanx.models.spec import LoraSpec
from phalanx.planner.answers import Answer, SizedPlan, is_tight
from phalanx.planner.clusters import HERE_FILE, AskedCluster
from phalanx.planner.search import answer
from phalanx.planner.sized import limit_of, sized_plans, smallest_plan
from phalanx.planner.training import Training

_MOST_TIMES = 64  # devices, of those that were asked for
_MOST_DEVICES = 1 << 17
_MOST_OFFERS = 12  # of other machines, that are planned
_USUAL_LOSS = 1.3  # of a step over its products, at least
_LORA_RANK = 16
_SHORTEST_ROW = 128


@dataclass(frozen=True)
class Nearest:
    """A job that fits.

    Attributes:
        change: what is different, in words.
        flags: what to change in the command.
    """

    change: str
    flags: str
    answer: Answer


def nearest_that_fit(
    refused: Answer, *, minimise: str = "time", limit_bytes: float = 0.0, count: int = 3
) -> list[Nearest]:
    """Up to `count` changes after which a refused job fits, nearest first.

    Each has a plan that `phalanx train` runs, where it knows the model.
    """
    limits: dict[str, Any] = {
        "limit_bytes": limit_bytes,
        "limit_s": refused.limit_s,
        "budget_usd": refused.budget_usd,
        "must_run": refused.training.config is not None,
    }
    found: list[Nearest] = []
    has_more = False
    for change, flags, other, cluster in _changes(refused, limit_bytes):
        is_more = cluster.machine == refused.asked.cluster.machine and flags.startswith("--on")
        if is_more and has_more:
            continue  # the fewest devices are enough to know
        named = flags.removeprefix("--on ") if is_more else str(cluster)
        where = AskedCluster(named, cluster)
        reached = answer(other, where, minimise=minimise, **limits)
        if reached.verdict == "fits":  # not one that only just does
            found.append(Nearest(change, flags, reached))
            has_more |= is_more
        if len(found) == count:
            break
    return found


def _changes(refused: Answer, limit_bytes: float) -> Iterator[tuple[str, str, Training, Cluster]]:
    """(change, flags, training, cluster), nearest first; whoever takes them verifies them."""
    training, cluster = refused.training, refused.asked.cluster
    if refused.smallest is None:
        yield from _other_batches(training, cluster)
    if training.method == "full":
        lora = LoraSpec(rank=_LORA_RANK, alpha=2.0 * _LORA_RANK)
        yield (
            f"adapters of rank {_LORA_RANK} instead of all weights",
            f"--lora {_LORA_RANK}",
            replace(training, method="lora", lora=lora),
            cluster,
        )
    if _rows_matter(refused) and (refused.best is None or training.profile is not None):
        yield from _shorter_rows(training, cluster)
    sizes = _smallest_plans(training, cluster)
    for number, smallest in sizes.items():
        more, name = Cluster(cluster.machine, number), _called(refused.asked, number)
        is_more = number > cluster.num_devices and bool(name)
        if is_more and not is_tight(smallest, limit_of(more, limit_bytes)):
            yield f"{number} devices", f"--on {name}", training, more
            if refused.best is None:  # the first that holds it; for speed it may take more
                break
    yield from _other_machines(refused, sizes, limit_bytes)


def _called(asked: AskedCluster, number: int) -> str:
    """So many of the devices that were asked for, as a command line names them: by their file,
    where they come from one; "" for more of what a cluster file joins."""
    if asked.mixed is not None:
        times = number // asked.cluster.num_devices
        parts = [f"{times * each.num_devices}x{each.machine.name}" for each in asked.mixed.parts]
        return "" if asked.mixed.name else "+".join(parts)
    name = HERE_FILE if asked.text.lower() == "here" else asked.text
    if name.endswith(".toml"):
        return f"{number}x{re.sub(r'^[0-9]+x', '', name)}"
    return f"{number}x{asked.cluster.machine.name}"


def _other_batches(
    training: Training, cluster: Cluster
) -> Iterator[tuple[str, str, Training, Cluster]]:
    """The nearest batch that gives every data rank a row."""
    if training.profile is not None:
        return
    asked = training.batch_tokens // training.seq_tokens
    counts = {-(-asked // degree) * degree for degree in divisors(cluster.num_devices)}
    for rows in sorted(counts - {asked}, key=lambda rows: abs(rows - asked)):
        tokens = rows * training.seq_tokens
        other = replace(training, batch_tokens=tokens)
        plans = sized_plans(other, cluster)
        if plans.runnable().any() if training.config is not None else len(plans):
            yield f"batches of {rows:,} rows", f"--global-tokens {tokens}", other, cluster
            return


def _rows_matter(refused: Answer) -> bool:
    """Whether a plan without activations would fit."""
    if refused.smallest is None:
        return False
    terms = refused.smallest.terms
    return refused.smallest.peak_bytes - terms["activations"] <= refused.limit_bytes


def _shorter_rows(
    training: Training, cluster: Cluster
) -> Iterator[tuple[str, str, Training, Cluster]]:
    """Shorter rows, or without the documents that make them long, the longest first."""
    profile = training.profile
    if profile is None:
        seq = training.seq_tokens
        while (seq := seq // 2) >= _SHORTEST_ROW:
            shorter_rows = replace(training, seq_tokens=seq)
            yield f"rows of {seq:,} tokens", f"--seq {seq}", shorter_rows, cluster
        return
    limit = profile.longest
    while (limit := limit // 2) >= _SHORTEST_ROW:
        kept = np.flatnonzero(profile.samples.lengths <= limit)
        if 2 * len(kept) < len(profile.samples):
            return
        shorter = replace(profile, samples=profile.samples.take(kept))
        num_left_out = len(profile.samples) - len(kept)
        yield (
            f"documents of at most {limit:,} tokens, {num_left_out:,} left out",
            f"--data.max_tokens {limit} --data.too_long drop",
            replace(training, profile=shorter),
            cluster,
        )


def _smallest_plans(training: Training, cluster: Cluster) -> dict[int, SizedPlan]:
    """Devices, doubled again and again -> the plan that needs the least memory of a rank."""
    found: dict[int, SizedPlan] = {}
    number = cluster.num_devices
    while number <= min(_MOST_TIMES * cluster.num_devices, _MOST_DEVICES):
        smallest = smallest_plan(training, Cluster(cluster.machine, number))
        if smallest is None and found:
            break
        if smallest is not None:
            found[number] = smallest
        number *= 2
    return found


def _other_machines(
    refused: Answer, sizes: dict[int, SizedPlan], limit_bytes: float
) -> Iterator[tuple[str, str, Training, Cluster]]:
    """Other kinds of devices, the fewest that may do: cheapest an hour first, and where the job has
    a deadline or a budget, cheapest for its products."""
    training, cluster = refused.training, refused.asked.cluster
    is_limited = refused.limit_s > 0 or refused.budget_usd > 0
    offers: list[tuple[float, Cluster]] = []
    for name in machine_names():
        machine = read_machine(name)
        if name == cluster.machine.name or machine.price is None:
            continue
        if training.precision == "bf16" and not machine.has_bf16:
            continue
        device_s = training.least_device_s(machine)
        if 0 < refused.budget_usd < device_s / 3600 * machine.usd_per_h:
            continue
        for number, smallest in sizes.items():
            other = Cluster(machine, number)
            is_slow = 0 < refused.limit_s < _USUAL_LOSS * device_s / number
            if not is_slow and not is_tight(smallest, limit_of(other, limit_bytes)):
                devices_s = device_s if is_limited else number
                offers.append((devices_s * machine.usd_per_h, other))
                break
    for _, other in sorted(offers, key=lambda offer: (offer[0], str(offer[1])))[:_MOST_OFFERS]:
        yield other.machine.title, f"--on {other}", training, other

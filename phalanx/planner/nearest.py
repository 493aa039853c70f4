"""What is nearest to a training job that does not fit: each answer is computed, and fits.

The order is that of what it costs the user: the same devices with other work, then more devices of
the same kind, then the cheapest other machine.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace

import numpy as np

from phalanx.hardware import Cluster, machine_names, read_machine
from phalanx.models.spec import LoraSpec
from phalanx.planner.clusters import AskedCluster
from phalanx.planner.search import Answer, answer, is_tight, limit_of, smallest_plan
from phalanx.planner.training import Training

_MOST_TIMES = 64  # devices, of those that were asked for
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
    """Up to `count` changes after which a refused job fits, nearest first."""
    limits = {"limit_bytes": limit_bytes, "limit_s": refused.limit_s}
    found: list[Nearest] = []
    for change, flags, other, cluster in _changes(refused, limit_bytes):
        where = AskedCluster(str(cluster), cluster)
        reached = answer(other, where, minimise=minimise, **limits)
        if reached.verdict == "fits":  # not one that only just does
            found.append(Nearest(change, flags, reached))
        if len(found) == count:
            break
    return found


def _changes(refused: Answer, limit_bytes: float) -> Iterator[tuple[str, str, Training, Cluster]]:
    """(change, flags, training, cluster), nearest first; whoever takes them verifies them."""
    training, cluster = refused.training, refused.asked.cluster
    if training.method == "full":
        lora = LoraSpec(rank=_LORA_RANK, alpha=2.0 * _LORA_RANK)
        yield (
            f"adapters of rank {_LORA_RANK} instead of all weights",
            f"--lora {_LORA_RANK}",
            replace(training, method="lora", lora=lora),
            cluster,
        )
    if _rows_matter(refused):
        yield from _shorter_rows(training, cluster)
    sizes = _smallest_peaks(training, cluster)
    for number, peak in sizes.items():
        more = Cluster(cluster.machine, number)
        if number > cluster.num_devices and not is_tight(peak, limit_of(more, limit_bytes)):
            yield f"{number} devices", f"--on {more}", training, more
            if refused.best is None:  # the first that holds it; for speed it may take more
                break
    yield from _other_machines(training, cluster, sizes, limit_bytes)


def _rows_matter(refused: Answer) -> bool:
    """Whether a plan without activations would fit."""
    if refused.smallest is None:
        return False
    terms = refused.smallest.terms
    return refused.smallest.peak_bytes - terms["activations"] <= refused.limit_bytes


def _shorter_rows(
    training: Training, cluster: Cluster
) -> Iterator[tuple[str, str, Training, Cluster]]:
    """Without the documents that make rows long, the longest first."""
    profile, limit = training.profile, training.profile.longest
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


def _smallest_peaks(training: Training, cluster: Cluster) -> dict[int, float]:
    """Devices, doubled again and again -> the least bytes of a rank that a legal plan needs."""
    found: dict[int, float] = {}
    number = cluster.num_devices
    while number <= _MOST_TIMES * cluster.num_devices:
        smallest = smallest_plan(training, Cluster(cluster.machine, number))
        if smallest is None:
            break
        found[number] = smallest.peak_bytes
        number *= 2
    return found


def _other_machines(
    training: Training, cluster: Cluster, peaks: dict[int, float], limit_bytes: float
) -> Iterator[tuple[str, str, Training, Cluster]]:
    """Other kinds of devices, the fewest that hold it, cheapest an hour first."""
    offers: list[tuple[float, Cluster]] = []
    for name in machine_names():
        if name == cluster.machine.name:
            continue
        machine = read_machine(name)
        for number, peak in peaks.items():
            other = Cluster(machine, number)
            if not is_tight(peak, limit_of(other, limit_bytes)):
                offers.append((number * machine.price.value, other))
                break
    for _, other in sorted(offers, key=lambda offer: (offer[0], str(offer[1]))):
        yield other.machine.title, f"--on {other}", training, other

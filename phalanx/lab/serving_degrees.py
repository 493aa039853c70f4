"""How a published serving row cuts its model, from columns that count in several ways.

Exporters print the tensor degree of attention, or of the experts, or all devices of an engine; some
multiply what they have multiplied already. Each reading below is backed by rows that the same
table holds twice, once in each form.
"""

from __future__ import annotations

from typing import NamedTuple

from phalanx.lab.csv_rows import CsvRow

_NODE = 8  # devices of the largest engine that an aggregated row can mean, without a rack
TENSOR, WORKERS = "tp", "workers"


class Degrees(NamedTuple):
    """Of one engine: tensor ranks of attention, stages, expert ranks, attention replicas."""

    tensor: int = 1
    pipeline: int = 1
    expert: int = 1
    attention_dp: int = 1
    workers: int = 1

    @property
    def devices(self) -> int:
        """Of all its workers."""
        return self.tensor * self.pipeline * self.attention_dp * self.workers


def aggregated_degrees(row: CsvRow) -> Degrees | None:
    """Of a row whose engine computes prompts and answers; None where it does not say.

    - A row of one device has all degrees 1.
    - `tp` may count cores; then the number of devices is meant.
    - tp x attention_dp beyond a node: the exporter multiplied by the expert degree once more.
    - tp = attention_dp and ep their product: tp counts the devices, attention is not cut.
    - A `tp` that is no power of two is a sum over engines that the row does not name.
    """
    devices = row.count("n_devices") or 0
    tensor = row.count("tp") or 0
    replicas = row.count("attention_dp") or 1
    expert = row.count("ep") or 1
    pipeline = row.count("pp") or 1
    if not tensor:
        if devices == 1:
            return Degrees()
        if replicas > 1 and devices == replicas:
            return Degrees(1, pipeline, expert, replicas)
        return None
    if "counts" in row.words("notes") and "cores" in row.words("notes"):
        return Degrees(devices or max(tensor // 2, 1), pipeline)
    if tensor == replicas and tensor > 1 and expert == tensor * replicas:
        return Degrees(1, pipeline, replicas, replicas)
    if tensor * replicas > _NODE and expert > 1 and not devices:
        if replicas > 1 and replicas % expert == 0:
            replicas //= expert
        elif tensor % expert == 0:
            tensor //= expert
    if tensor & (tensor - 1) or tensor * replicas > 2 * _NODE:
        return None
    return Degrees(tensor, pipeline, min(expert, tensor * replicas), replicas)


def split_degrees(row: CsvRow) -> tuple[Degrees, Degrees] | None:
    """Of the engines for prompts and for answers; None where their numbers are not given.

    Rows without the number of workers do not say how many requests each of them serves.
    """
    found = []
    for role in ("prefill", "decode"):
        workers = row.count(f"{role}_workers")
        tensor = row.count(f"{role}_tp")
        if not workers or not tensor:
            return None
        replicas = row.count(f"{role}_attention_dp") or 1
        expert = min(row.count(f"{role}_moe_ep") or 1, tensor * replicas)
        found.append(Degrees(tensor, 1, expert, replicas, workers))
    devices = row.count("n_devices")
    if devices and devices != found[0].devices + found[1].devices:
        return None
    return found[0], found[1]

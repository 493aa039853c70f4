"""A small training job and clusters for tests of the search."""

from __future__ import annotations

import numpy as np

from phalanx.data.samples import Audit, Sample, Samples
from phalanx.hardware import Cluster, read_machine
from phalanx.models.spec import LoraSpec, small_config
from phalanx.planner.clusters import AskedCluster
from phalanx.planner.profile import DataProfile
from phalanx.planner.training import Training

CONFIG = small_config(
    vocab_size=1000, hidden_size=256, intermediate_size=512, num_layers=4, num_heads=8,
    num_kv_heads=2, head_dim=32, dtype="bfloat16",
)  # fmt: skip
LENGTHS = (40, 60, 25, 100, 220, 80, 50, 30)
LORA = LoraSpec(rank=4, alpha=8.0)


def profile(lengths=LENGTHS, times=8):
    """Samples of these lengths, half of whose tokens count."""
    made = []
    for key, length in enumerate(lengths * times):
        counted = np.arange(length) % 2 == 1
        made.append(Sample(np.zeros(length, dtype=np.int32), counted, key + 1))
    samples = Samples.of(made)
    audit = Audit(
        rows_in=len(made), rows_dropped=0, rows_cut=0, samples=len(made),
        tokens_in=samples.num_tokens, tokens_trained=samples.num_counted,
        tokens_masked=samples.num_tokens - samples.num_counted, tokens_dropped=0,
    )  # fmt: skip
    return DataProfile(
        source="made", samples=samples, audit=audit, counted_by="hand", is_assumption=False
    )


def training(method="lora", **changes):
    """One epoch of it."""
    lora = LORA if method == "lora" else None
    given = {"config": CONFIG, "profile": profile(), "method": method, "lora": lora}
    return Training(**(given | {"batch_tokens": 1024} | changes))


def asked(number=2, name="h100"):
    """A cluster as if a user had named it."""
    cluster = Cluster(read_machine(name), number)
    return AskedCluster(str(cluster), cluster)

"""How long each stage of a whole run takes on this machine, before its first step. No torch.

Symbols: T, N tokens and targets; w bytes of the exported weights; f forward seconds per token, h
per target in the head, both measured and summed over the ranks that share a token.

Seconds
    start       processes of training and of serving, each as long as one took when it was measured
    load        w / read rate, for each process that loads: they share a disk and a page cache
    evaluate    evaluations * (T f + N h) / ranks
    sample      2 * samples * tokens * ranks * a decode step: with the weights before and after, by
                every rank, which share the memory's bandwidth
    train       steps * step
    export      2 w / write rate: the adapter is merged, the folder hashed and synchronised
    parity      forms * tokens * (f + h), in float32 as well as in the served dtype
    serve       the simulated load test

Differences and limits: rates of disks are assumptions (they are not measured before the first
step); parity's forms are priced like training's forward pass, in float32 `FLOAT32` times that.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from phalanx.cost.local_shapes import local_config
from phalanx.cost.training import Workload, priced_operators
from phalanx.models.config import DecoderConfig
from phalanx.report import Report

READ_BYTES_PER_S = WRITE_BYTES_PER_S = 1e9  # assumption: a warm page cache, a local SSD
FLOAT32 = 2.0  # rows of a prompt are few, so products wait for weights, which are twice the bytes
_NOTE = "stages: {stages}; disks at 1 GB/s are an assumption, the rest from measured rates"


@dataclass(frozen=True, kw_only=True)
class RunWork:
    """What a whole run does beside its steps.

    Attributes:
        elapsed_s: what has passed when the forecast is made: data, calibration, planning.
        step_s: predicted, of a training step.
        num_evaluations, held_out_tokens, held_out_counted: of each evaluation, all ranks together.
        num_samples, sample_tokens: answers before and after.
        decode_s: of one output token of one request.
        weight_bytes: of the model.
        parity_tokens: tokens of all prompts and answers that are compared; by parity_forms in
            bfloat16 and parity_wide in float32.
        load_s: of the load test, simulated (0: none).
    """

    elapsed_s: float
    step_s: float
    num_evaluations: int
    held_out_tokens: int
    held_out_counted: int
    num_samples: int
    sample_tokens: int
    decode_s: float
    weight_bytes: float
    parity_tokens: int
    parity_forms: int
    parity_wide: int
    load_s: float


def forward_rates(
    config: DecoderConfig, work: Workload, rates: Mapping[str, float]
) -> tuple[float, float]:
    """Forward seconds per token of the layers, and per target of the head, of all ranks that share
    them together (a tensor axis its products, a context axis its rows).

    Args:
        config: sizes of the whole model.
        rates: rate key -> seconds per token, as measured for this work.
    """
    layers_s = head_s = 0.0
    local, num_sharing = local_config(config, work.tensor_degree), work.tensor_degree
    num_sharing *= work.context_degree
    for op, forward_s, _, _ in priced_operators(local, work, rates):
        if op.op == "head":
            head_s += num_sharing * forward_s / work.counted
        else:
            layers_s += num_sharing * forward_s / work.tokens
    return layers_s, head_s


def run_stages(
    run: RunWork, config: DecoderConfig, work: Workload, rates: Mapping[str, float], num_ranks: int
) -> dict[str, float]:
    """Stage -> seconds, in the order of the run."""
    token_s, target_s = forward_rates(config, work, rates)
    evaluation_s = run.held_out_tokens * token_s + run.held_out_counted * target_s
    compared_s = run.parity_tokens * (token_s + target_s)
    forms = run.parity_forms + FLOAT32 * run.parity_wide
    reads = num_ranks + run.parity_forms + run.parity_wide + 1
    start_s = rates.get("start", 0.0)
    return {
        "before": run.elapsed_s,
        "start": 3 * start_s,
        "load": reads * run.weight_bytes / READ_BYTES_PER_S,
        "evaluate": run.num_evaluations * evaluation_s / num_ranks,
        "sample": 2 * run.num_samples * run.sample_tokens * num_ranks * run.decode_s,
        "train": work.num_steps * run.step_s,
        "export": 2 * run.weight_bytes / WRITE_BYTES_PER_S,
        "parity": compared_s * forms,
        "serve": run.load_s,
    }


def stage_report(stages: Mapping[str, float]) -> Report:
    """The row "time/whole run"."""
    report = Report("whole run")
    shown = ", ".join(f"{name} {seconds:.0f} s" for name, seconds in stages.items())
    note = _NOTE.format(stages=shown)
    report.add("time/whole run", sum(stages.values()), "s", "formula", note=note)
    return report

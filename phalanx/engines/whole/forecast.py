"""What a whole run will take beside its training steps: serving, and the time of every stage."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

from phalanx.cost.serving import ServeRates
from phalanx.doctor.machine import available_bytes
from phalanx.engines.calibrate_serving import calibrate_serving
from phalanx.engines.result import NUM_SAMPLES, SAMPLE_TOKENS
from phalanx.engines.serve.kv_room import KvLimits, kv_tokens
from phalanx.engines.whole.train_job import Ready
from phalanx.models.spec import weight_bytes
from phalanx.planner.serving import predict_load
from phalanx.planner.stages import RunWork, run_stages, stage_report
from phalanx.report import Report, Row

_PARITY_FORMS, _PARITY_WIDE = 3, 5  # passes over the compared tokens: served dtype, float32


class Load(NamedTuple):
    """What a run asks of the served model.

    Attributes:
        prompt_lens: tokens of each prompt of the load test.
        compared_lens: of each prompt on which all forms are compared.
        output_tokens: of each answer, of both.
    """

    prompt_lens: Sequence[int]
    compared_lens: Sequence[int]
    output_tokens: int


def forecast_rows(ready: Ready, load: Load, elapsed_s: float) -> list[Row]:
    """Rows of "serving/...", "load/..." and "time/whole run".

    Args:
        elapsed_s: since the run began.

    Raises:
        WorldError: when the measuring process fails; JobError: for a KV cache that cannot be.
    """
    rates = _rates(ready)
    served = _served(ready, rates, load) if load.prompt_lens else Report("load test")
    stages = run_stages(
        _work(ready, rates, load, served, elapsed_s),
        ready.source.config,
        ready.work,
        ready.rates,
        ready.asked.num_ranks,
    )
    return [*served.rows, *stage_report(stages).rows]


def _rates(ready: Ready) -> ServeRates:
    table = calibrate_serving(ready.source.config, ready.asked.job.serve)
    return ServeRates.from_dict(table["rates"])


def _served(ready: Ready, rates: ServeRates, load: Load) -> Report:
    job, config = ready.asked.job, ready.source.config
    serve = job.serve
    limits = KvLimits(
        max_tokens=serve.max_tokens,
        max_running=serve.max_running,
        max_step_tokens=serve.max_step_tokens,
    )
    free_bytes = available_bytes() - weight_bytes(config)
    return predict_load(
        rates,
        config,
        scheduler=job.plan.serve,
        prompt_lens=load.prompt_lens,
        output_tokens=load.output_tokens,
        max_running=serve.max_running,
        max_tokens=serve.max_tokens,
        max_step_tokens=serve.max_step_tokens,
        kv_tokens=kv_tokens(config, limits, asked=serve.kv_tokens, free_bytes=free_bytes),
    )


def _work(ready: Ready, rates: ServeRates, load: Load, served: Report, elapsed_s: float) -> RunWork:
    job, data = ready.asked.job, ready.data
    held_out = data.held_out.take(range(min(job.train.eval_rows, len(data.held_out))))
    lengths = [len(held_out[at].tokens) for at in range(len(held_out))]
    counted = sum(int(held_out[at].counted.sum()) for at in range(len(held_out)))
    between = ready.work.num_steps // job.train.eval_every if job.train.eval_every else 0
    predicted = {row["quantity"]: row["value"] for row in ready.plan.predictions}
    compared = sum(each + load.output_tokens for each in load.compared_lens)
    return RunWork(
        elapsed_s=elapsed_s,
        step_s=predicted["training/step time"],
        num_evaluations=2 + between if lengths else 0,
        held_out_tokens=sum(lengths),
        held_out_counted=counted,
        num_samples=min(NUM_SAMPLES, len(lengths)),
        sample_tokens=SAMPLE_TOKENS,
        decode_s=rates.decode_s(1, job.serve.max_tokens // 2),
        weight_bytes=weight_bytes(ready.source.config),
        parity_tokens=compared,
        parity_forms=_PARITY_FORMS,
        parity_wide=_PARITY_WIDE,
        load_s=sum(row.value or 0.0 for row in served.rows if row.quantity == "load/duration"),
    )

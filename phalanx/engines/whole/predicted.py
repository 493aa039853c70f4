"""What a training run took beside what was predicted before its first step."""

from __future__ import annotations

from phalanx.engines.result import TrainResult
from phalanx.plan import Plan
from phalanx.report import Report, Row

# Distance of a prediction from the measurement that `--check` accepts.
_PREDICTION_FRAC = 0.15


def training_report(name: str, plan: Plan, result: TrainResult) -> Report:
    """Predicted and measured rows; a prediction is the gate of its measurement.

    Args:
        name: of the job.
        plan: with the predictions.
    """
    report = Report(f"{name} on this machine")
    report.notes["samples"] = list(result.samples)
    report.notes["audit"] = dict(result.audit)
    if result.stopped:
        report.notes["stopped"] = f"after step {result.steps}: {result.stopped}"
    report.rows += [Row(**table) for table in plan.predictions]
    predicted = {row.quantity: row.value for row in report.rows}
    for quantity, value, unit in (
        ("training/step time", result.step_s, "s"),
        ("training/peak memory", result.peak_bytes, "bytes"),
        ("training/tokens per second", result.tokens_per_s, "1/s"),
        ("training/counted tokens per second", result.counted_per_s, "1/s"),
    ):
        target = predicted.get(quantity)
        gate = {"target": target, "tolerance_frac": _PREDICTION_FRAC} if target else {}
        note = "gate: the prediction, made before step 1" if target else ""
        report.add(quantity, value, unit, "measured", note=note, **gate)
    _add_losses(report, result)
    for stage, seconds in result.seconds.items():
        report.add(f"time/{stage}", seconds, "s", "measured", note="rank 0")
    return report


def _add_losses(report: Report, result: TrainResult) -> None:
    if result.loss_before is None:  # no rows were held out
        return
    unit = "nats/token"
    report.add("training/held-out loss before", result.loss_before, unit, "measured")
    report.add(
        "training/held-out loss after",
        result.loss_after,
        unit,
        "measured",
        note="gate: below the loss before",
        target=result.loss_before,
        bound="below",
    )

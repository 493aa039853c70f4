"""The planner scored on tables of measurements: per source, per class and per grid of plans."""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Iterator, Sequence
from dataclasses import replace

import numpy as np

from phalanx.cost.rl_step import RlStep
from phalanx.lab.baseline import ConstantRate, shipped_rate
from phalanx.lab.rl_rows import RlRow, predict_rl
from phalanx.lab.scored import GridScore, Point, SourceScore, Validation
from phalanx.lab.scores import (
    CallScore,
    ErrorScore,
    Estimate,
    call_score,
    error_score,
    spearman,
    top_regret,
)
from phalanx.lab.serving_predict import ServingPrediction, predict_serving
from phalanx.lab.serving_rows import ServingRow
from phalanx.lab.training_predictions import TrainingPrediction, predict_training, unpriced
from phalanx.lab.training_rows import TrainingRow

LEAST_IN_GRID = 5  # runs that ended, for ranks to mean something
_NOT_A_NUMBER = float("nan")
_RANKED = "latency_s"
Answer = TrainingPrediction | ServingPrediction
Row = TrainingRow | ServingRow


def validate(
    training: Sequence[TrainingRow], serving: Sequence[ServingRow], rl: Sequence[RlRow] = ()
) -> Validation:
    """Price every row and compare; the order of sources is that of the tables.

    Args:
        training: rows of a training table; those of reinforcement learning lack what has no column.
        serving: rows of a serving table.
        rl: of the same training table, rows of reinforcement learning with what their notes say.
    """
    whole = {row.line: row for row in rl}
    training = [
        replace(row, missing=whole[row.line].missing) if row.line in whole else row
        for row in training
    ]
    steps = dict(zip(whole, predict_rl(rl)))
    priced = [
        _of_rl(row, steps[row.line]) if row.line in steps else answer
        for row, answer in zip(training, predict_training(training))
    ]
    answered = predict_serving(serving) if serving else []
    points = [
        *_training_points(training, priced, shipped_rate()),
        *_serving_points(serving, answered),
    ]
    answers: list[tuple[Row, Answer]] = [*zip(training, priced), *zip(serving, answered)]
    return Validation(
        sources=_source_scores(answers, points),
        grids=[*_grid_scores(training, priced), *_serving_grids(serving, answered)],
        memory_calls=_memory_calls(training, priced),
        points=points,
        unpriced=[
            (row.source_id, row.row_class, row.line, answer.reason)
            for row, answer in answers
            if answer.reason
        ],
    )


def _of_rl(row: TrainingRow, step: RlStep | None) -> TrainingPrediction:
    if step is None:
        return unpriced(row)
    return TrainingPrediction(step_s=Estimate(step.total.value, step.total.low, step.total.high))


def _training_points(
    rows: Sequence[TrainingRow], made: Sequence[TrainingPrediction], baseline: ConstantRate
) -> Iterator[Point]:
    for row, answer in zip(rows, made):
        if not row.is_trusted or row.failed:
            continue
        key = (row.source_id, row.row_class, row.line)
        if row.measured_step_s and answer.step_s:
            beside = baseline.step_s(row)
            yield Point(*key, "step_s", row.measured_step_s, answer.step_s, beside)
        if row.measured_memory_bytes and answer.memory_bytes:
            peak = row.measured_memory_bytes
            yield Point(*key, "memory_bytes", peak, answer.memory_bytes, _NOT_A_NUMBER)


def _serving_points(
    rows: Sequence[ServingRow], made: Sequence[ServingPrediction]
) -> Iterator[Point]:
    for row, answer in zip(rows, made):
        for name, measured in row.measured.items():
            if row.is_trusted and measured > 0 and name in answer.values:
                key = (row.source_id, row.row_class, row.line)
                yield Point(*key, name, measured, answer.values[name], _NOT_A_NUMBER)


def _is_priced(answer: Answer) -> bool:
    if isinstance(answer, TrainingPrediction):
        return answer.step_s is not None
    return bool(answer.values)


def _source_scores(
    answers: Sequence[tuple[Row, Answer]], points: Sequence[Point]
) -> list[SourceScore]:
    rows: dict[tuple[str, str], list[tuple[Row, Answer]]] = defaultdict(list)
    compared: dict[tuple[str, str], dict[str, list[Point]]] = defaultdict(lambda: defaultdict(list))
    for row, answer in answers:
        rows[row.source_id, row.row_class].append((row, answer))
    for point in points:
        compared[point.source_id, point.row_class][point.quantity].append(point)
    return [
        SourceScore(
            source_id=source,
            row_class=row_class,
            rows=len(each),
            complete=sum(not row.missing for row, _ in each),
            predicted=sum(not row.missing and _is_priced(answer) for row, answer in each),
            from_memory=sum(not row.is_trusted for row, _ in each),
            reasons=dict(Counter(answer.reason for _, answer in each if answer.reason)),
            errors={
                quantity: score
                for quantity, of_quantity in compared[source, row_class].items()
                if (score := _error_score(of_quantity)) is not None
            },
        )
        for (source, row_class), each in rows.items()
    ]


def _error_score(points: Sequence[Point]) -> ErrorScore | None:
    return error_score(
        [point.measured for point in points],
        [point.predicted for point in points],
        [point.baseline for point in points],
    )


def _grid_scores(
    rows: Sequence[TrainingRow], made: Sequence[TrainingPrediction]
) -> list[GridScore]:
    grids: dict[str, list[tuple[TrainingRow, TrainingPrediction]]] = defaultdict(list)
    for row, answer in zip(rows, made):
        if row.row_class == "grid" and answer.step_s is not None:
            grids[row.grid].append((row, answer))
    found = [_grid_score(name, plans) for name, plans in grids.items()]
    return [score for score in found if score is not None]


def _grid_score(
    name: str, plans: Sequence[tuple[TrainingRow, TrainingPrediction]]
) -> GridScore | None:
    ran = [(row, each) for row, each in plans if row.measured_step_s and not row.failed]
    if len(ran) < LEAST_IN_GRID:
        return None
    measured = [row.measured_step_s or 0.0 for row, _ in ran]
    predicted = [_step(each) for _, each in ran]
    fitting = [pair for pair in plans if pair[1].fits >= 0.5] or list(plans)
    choice = min(fitting, key=lambda pair: _step(pair[1]))[0]
    return GridScore(
        source_id=plans[0][0].source_id,
        grid=name,
        ran=len(ran),
        failed=sum(row.failed for row, _ in plans),
        spearman=spearman(predicted, measured),
        regret=top_regret(measured, predicted),
        choice_failed=choice.failed,
    )


def _serving_grids(
    rows: Sequence[ServingRow], made: Sequence[ServingPrediction]
) -> list[GridScore]:
    """Engines of one model on one accelerator at one load, ranked by request latency."""
    grids: dict[tuple[str, str], list[tuple[float, float]]] = defaultdict(list)
    for row, answer in zip(rows, made):
        measured, predicted = row.measured.get(_RANKED), answer.values.get(_RANKED)
        if measured and predicted is not None:
            grids[row.source_id, row.rank_group].append((predicted.value, measured))
    return [
        GridScore(
            source_id=source,
            grid=name,
            ran=len(pairs),
            failed=0,
            spearman=spearman(*zip(*pairs)),
            regret=top_regret([pair[1] for pair in pairs], [pair[0] for pair in pairs]),
            choice_failed=False,
        )
        for (source, name), pairs in grids.items()
        if len(pairs) >= LEAST_IN_GRID
    ]


def _step(answer: TrainingPrediction) -> float:
    return answer.step_s.value if answer.step_s else np.inf


def _memory_calls(
    rows: Sequence[TrainingRow], made: Sequence[TrainingPrediction]
) -> dict[str, CallScore]:
    """Of sources that list failed runs; which of these ran out of memory they do not say."""
    calls: dict[str, tuple[list[bool], list[bool]]] = defaultdict(lambda: ([], []))
    for row, answer in zip(rows, made):
        if answer.fits == answer.fits and (row.failed or row.measured_step_s):
            called, true = calls[row.source_id]
            called.append(answer.fits < 0.5)
            true.append(row.failed)
    scores = {source: call_score(*each) for source, each in calls.items()}
    return {source: score for source, score in scores.items() if score is not None}

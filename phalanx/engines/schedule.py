"""The learning rate of a step. No torch; a function of the step alone, so a resumed run goes on."""

from __future__ import annotations

from math import cos, pi, sqrt

from phalanx.errors import JobError, nearest_names

SCHEDULES = ("cosine", "linear", "constant", "wsd")


def learning_rate(
    step: int,
    *,
    schedule: str,
    peak: float,
    warmup_steps: int,
    num_steps: int,
    final_frac: float = 0.1,
    decay_frac: float = 0.2,
) -> float:
    """Learning rate of `step`: a linear warm-up, then the schedule's way down.

    With d the part of the way from the end of the warm-up to the end of the run, f `final_frac`:

    | schedule | factor on the peak |
    |---|---|
    | cosine | f + (1 - f) (1 + cos(pi d)) / 2 (Loshchilov and Hutter, arXiv 1608.03983, eq. 5) |
    | linear | 1 - (1 - f) d |
    | constant | 1 |
    | wsd | 1, then 1 - (1 - f) sqrt(x) while x goes from 0 to 1 over the last `decay_frac` of all
      steps: the "1-sqrt" cooldown of Haegele et al., arXiv 2405.18392, section 3.2, with a floor |

    d and x are 0 at the first step after the warm-up (of the decay) and would be 1 one step after
    the last, so the last step is a little above the floor and never wasted on a rate of zero.

    Args:
        step: from 0; step `warmup_steps` is the first at the peak.
        schedule: one of `SCHEDULES`.
        warmup_steps: step s < warmup_steps has peak (s + 1) / (warmup_steps + 1); a warm-up as long
            as the run rises throughout.
        num_steps: of the whole run.
        final_frac: of the peak, towards which the rate falls ("constant" has none).
        decay_frac: last part of all steps that decays under "wsd"; it never begins in the warm-up.

    Raises:
        JobError: `job/bad-value` for another schedule.
    """
    if schedule not in SCHEDULES:
        rule, legal = "is no schedule of the learning rate", nearest_names(schedule, SCHEDULES)
        raise JobError("job/bad-value", "train.schedule", schedule, rule, legal=legal)
    if step < warmup_steps:
        return peak * (step + 1) / (warmup_steps + 1)
    start = warmup_steps
    if schedule == "wsd":
        start = max(warmup_steps, num_steps - round(decay_frac * num_steps))
    done = min(1.0, max(0, step - start) / max(1, num_steps - start))
    return peak * (final_frac + (1.0 - final_frac) * _left(schedule, done))


def _left(schedule: str, done: float) -> float:
    """How much of the way from the floor to the peak is left."""
    if schedule == "cosine":
        return 0.5 * (1.0 + cos(pi * done))
    if schedule == "linear":
        return 1.0 - done
    return 1.0 - sqrt(done) if schedule == "wsd" else 1.0

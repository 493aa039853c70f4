"""The pictures of a run's pages. Without matplotlib (the `report` extra) only their texts come."""

from __future__ import annotations

from phalanx.pages import charts
from phalanx.pages.canvas import Picture, picture
from phalanx.pages.content import RunPage, Timeline
from phalanx.pages.step_chart import ranks_note, step_alt, step_chart

_LOSS = "Loss in nats per counted token: every step on training rows, and on rows held out."
_SPEED = "Tokens per second of every step, all processes together."
_TIMELINE = "One optimizer step: as the plan was simulated before it ran, and as it ran."


def pictures(page: RunPage) -> list[Picture]:
    """The pictures that a run has numbers for."""
    made: list[Picture] = []
    curves, memory, timeline = page.curves, page.memory, page.timeline
    if curves.steps:
        alt = charts.loss_alt(curves)
        made.append(picture("loss", alt, _LOSS, lambda theme: charts.losses(curves, theme)))
        alt = charts.speed_alt(curves)
        made.append(picture("speed", alt, _SPEED, lambda theme: charts.speed(curves, theme)))
    if memory is not None:
        alt, caption = charts.memory_alt(memory), charts.memory_caption(memory)
        made.append(
            picture("memory", alt, caption, lambda theme: charts.memory_stack(memory, theme))
        )
    if timeline is not None and (timeline.simulated or timeline.measured):
        alt, caption = step_alt(timeline), _caption(timeline)
        made.append(picture("timeline", alt, caption, lambda theme: step_chart(timeline, theme)))
    return made


def _caption(timeline: Timeline) -> str:
    parts = (_TIMELINE, *timeline.notes, ranks_note(timeline))
    return " ".join(part for part in parts if part)

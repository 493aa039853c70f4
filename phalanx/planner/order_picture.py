"""A schedule as a picture before any job: its passes played with equal stages, text, PNG or SVG."""

from __future__ import annotations

from phalanx.planner.step_picture import PassSpan, draw_step, played_spans, timeline_text
from phalanx.policy import Order
from phalanx.worlds.pipeline_arrays import play

# of a rank's share of the model; the backward pass in one part, or half and half
_FORWARD_S, _BACKWARD_S = 1.0, 2.0


def order_spans(order: Order, num_ranks: int, num_items: int) -> list[PassSpan]:
    """When each rank computes what, in forward passes of a rank's share of the model.

    Raises:
        PlanError: `order/illegal` for sizes that this schedule does not have.
    """
    lists = order.order(num_ranks, num_items)
    share = num_ranks / order.num_stages(num_ranks)
    half_s = share * _BACKWARD_S / 2
    seconds = (share * _FORWARD_S, share * _BACKWARD_S, 0.0, half_s, half_s)
    return played_spans(play(lists, *seconds))


def order_text(order: Order, num_ranks: int, num_items: int, width: int = 91) -> str:
    """The schedule in `width` equal moments, a line per rank; see `timeline_text`."""
    return timeline_text(order_spans(order, num_ranks, num_items), width)


def draw_order(order: Order, num_ranks: int, num_items: int, path: str) -> None:
    """Write the picture; the ending of `path` says in which form (.png, .svg, .pdf).

    Raises:
        PlanError: as `order_spans`.
        JobError: `environment/missing` without matplotlib; `cli/file` when it cannot be written.
    """
    spans = order_spans(order, num_ranks, num_items)
    title = f"{order.policy_name}, {num_ranks} ranks, {num_items} micro-batches"
    draw_step(spans, title, path, unit="forward passes of a rank's share of the model")

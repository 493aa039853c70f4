"""`phalanx plan --explain`: terms, rates with their sources, and the job's own values."""

from __future__ import annotations

from phalanx.cli._plan_figures import quantity
from phalanx.cli.output import paragraph, write
from phalanx.errors import PhalanxError
from phalanx.planner.answers import Answer
from phalanx.planner.priced_job import PricedJob
from phalanx.planner.sizing import four_axes
from phalanx.units import format_bytes, format_flops, format_s


def explain(priced: PricedJob) -> None:
    """Terms of memory and time, rates with their sources, and the job's own values."""
    for each in priced.answers:
        write(f"\n{each.asked.text}\n")
        sized = each.best.sized if each.best else each.smallest
        if sized is not None:
            for name, value in sized.terms.items():
                write(f"  memory, {name}: {format_bytes(value)}\n")
        if each.best is not None:
            for name, value in each.best.parts.items():
                if value:
                    write(f"  step by the formula, {name}: {format_s(value)}\n")
            paragraph(each.source, indent=2, hang=2)
        for reason, count in each.illegal.items():
            write(f"  illegal, {count}: {reason}\n")
        if priced.training.profile is None:
            _show_sizing(each)
        for name, figure in each.asked.cluster.machine.figures().items():
            origin = f"{figure.kind}, {figure.source}, {figure.date}"
            paragraph(f"{name} = {quantity(name, figure.value)}  ({origin})", indent=2, hang=2)
    write("\n")
    paragraph(f"model: {priced.model.source}", hang=2)
    flops = 2.0 * priced.num_params
    write(f"forward pass of a token, products with weights: {format_flops(flops)}\n")
    for key, value, origin in priced.job.values():
        if origin != "default":
            paragraph(f"{key} = {value}  ({origin})", hang=2)


def _show_sizing(each: Answer) -> None:
    """What four inequalities say of the same question, without a search."""
    training = each.training
    try:
        sized = four_axes(
            training.shape,
            each.asked.cluster,
            step_tokens=training.batch_tokens,
            seq_tokens=training.seq_tokens,
        )
    except PhalanxError as error:
        paragraph(f"Llama 3's inequalities: {error}", indent=2, hang=2)
        return
    axes = f"t {sized.tensor}, c {sized.context}, p {sized.pipeline}, d {sized.data}"
    paragraph(f"Llama 3's inequalities give {axes}:", indent=2, hang=2)
    for reason in sized.reasons:
        paragraph(reason, indent=4, hang=2)

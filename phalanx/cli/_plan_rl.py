"""`phalanx plan MODEL --rl WORK`: a step of reinforcement learning on clusters."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING

import typer

from phalanx.cli._plan_figures import dollars, duration
from phalanx.cli.output import emit, paragraph, table, versioned, write
from phalanx.units import format_count, format_s

if TYPE_CHECKING:
    from phalanx.cost.model_shape import ModelShape
    from phalanx.planner.rl_plan import RlAnswer, RlPlan
    from phalanx.planner.rl_words import RlAsked

_HEADER = ("cluster", "pools", "step", "cost", "tokens/s/device", "bound by")


def plan_rl(
    model_name: str,
    on: str,
    rl: str,
    words: Mapping[str, str],
    arguments: Sequence[str],
    explain: bool,
    json_file: str,
) -> None:
    """Price a step on each cluster; exit 1 where none holds the model in both roles.

    Args:
        rl: what a step has to do; words: "precision", and "prompt" and "answer", which may stand
            in `rl` too.
        arguments: dotted flags of the job.

    Raises:
        JobError: from `rl_asked`, `asked_clusters`, `priced_model`.
    """
    from phalanx.cli._plan_ask import Asked
    from phalanx.planner.clusters import asked_clusters
    from phalanx.planner.models import priced_model
    from phalanx.planner.rl_plan import rl_answer
    from phalanx.planner.rl_words import rl_asked

    job = Asked(model_name, "", "", on, arguments).job()
    given = [f"{name}={words[name]}" for name in ("prompt", "answer") if words.get(name)]
    asked, clusters = rl_asked(",".join([rl, *given])), asked_clusters(on or job.plan.on)
    precision = words.get("precision") or "bf16"
    model = priced_model(job)
    shape = model.sizes
    answers = [rl_answer(shape, asked, each, precision=precision) for each in clusters]

    def show() -> None:
        _show(model.name, shape, asked, answers)
        if explain:
            _explain(answers)

    document = {
        "model": model.name,
        "answers": asked.num_answers,
        "clusters": [each.to_dict() for each in answers],
    }
    emit(versioned("plan-rl", **document), json_file, show)
    if not any(each.fits for each in answers):
        raise typer.Exit(1)


def _show(name: str, shape: ModelShape, asked: RlAsked, answers: list[RlAnswer]) -> None:
    lengths = asked.lengths
    paragraph(
        f"{name}: {format_count(shape.num_params)} parameters; all are trained; "
        f"{asked.num_prompts:,} prompts of {asked.prompt_tokens:,} tokens, {asked.samples:,} "
        f"answer{'s' if asked.samples > 1 else ''} each of {lengths.mean_tokens:,.0f} on average, "
        f"at most {lengths.limit_tokens:,.0f}",
        hang=2,
    )
    longest = lengths.longest_of(asked.num_answers)
    paragraph(f"the longest of {asked.num_answers:,} answers has {longest:,.0f} tokens", hang=2)
    write("\n")
    table(_HEADER, [line for each in answers for line in _lines(each, asked.staleness)])
    write("\n")
    for each in answers:
        for plan in each.plans:
            paragraph(f"{each.asked.text}: {plan.describe()}", hang=2)
            paragraph(_parts(plan), indent=2, hang=2)
        if not each.fits:
            rule = "no plan holds the weights, moments and caches of this model"
            paragraph(f"{each.asked.text}: {rule}", hang=2)
    paragraph(
        "time: answers by the law of lengths until the last one ends, with 90 % bars; tools, "
        "judges and environments are not in it. A price to compare with: `phalanx train` learns "
        "from data",
        hang=2,
    )


def _lines(each: RlAnswer, staleness: int) -> list[list[str]]:
    lines = []
    for plan in each.plans:
        behind = "on policy" if plan.step.is_colocated else f"{staleness} behind"
        pools = f"{1 if plan.step.is_colocated else 2}, {behind}"
        hours = [seconds / 3600.0 for seconds in plan.step.total]
        rate = f"{each.tokens_per_s(plan):,.0f}"
        cost = dollars(tuple(each.dollars(plan)))
        time = duration((hours[0], hours[1], hours[2]))
        lines.append([each.asked.text, pools, time, cost, rate, plan.step.binds])
    return lines or [[each.asked.text, "does not fit", "", "", "", "memory"]]


def _parts(plan: RlPlan) -> str:
    step = plan.step
    parts = {
        "answers": step.generation_s,
        "log-probabilities": step.scoring_s,
        "updates": step.training_s,
        "new weights": step.weights_s,
        "moments to the host and back": step.states_s,
    }
    return ", ".join(f"{name} {format_s(seconds)}" for name, seconds in parts.items() if seconds)


def _explain(answers: list[RlAnswer]) -> None:
    from phalanx.cost.rl_efficiency import rl_efficiency

    write("\n")
    paragraph(rl_efficiency().describe(), hang=2)
    for each in answers:
        price = each.asked.cluster.machine.price
        told = f"{price.value:g} $/h, {price.source} ({price.date})" if price else "no price known"
        paragraph(f"{each.asked.text}: {told}", hang=2)

"""What `phalanx plan` prints of a priced job."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from itertools import combinations

from phalanx.cli.output import paragraph, table, write
from phalanx.planner.nearest import Nearest
from phalanx.planner.price import PricedJob
from phalanx.planner.search import Answer
from phalanx.units import format_bytes, format_count, format_flops

_GIBIBYTE = 2.0**30
_HEADER = ("cluster", "verdict", "time", "cost", "peak of usable", "bound by")


def show(priced: PricedJob) -> None:
    """The job, a line per cluster, the plans behind them, and what is not in the numbers."""
    _show_job(priced)
    write("\n")
    table(_HEADER, [_line(each) for each in priced.answers])
    write("\n")
    for each in priced.answers:
        if each.fits:
            paragraph(f"{each.asked.text}: {_plan(each)}", hang=2)
    if priced.fits:
        _show_comparison(priced)
    elif priced.nearest:
        _show_nearest(priced.nearest)
    else:
        write("nothing that fits was found near it\n")
    for note in priced.notes:
        paragraph(note, hang=2)


def _show_job(priced: PricedJob) -> None:
    training, profile = priced.training, priced.training.profile
    params, trained = format_count(priced.num_params), format_count(priced.num_trained)
    how = "all are trained"
    if training.lora is not None:
        how = f"LoRA of rank {training.lora.rank} trains {trained}"
    paragraph(f"{priced.model.name}: {params} parameters; {how}", hang=2)
    dropped = f"{profile.audit.rows_dropped:,}" if profile.audit.rows_dropped else "none"
    lengths = f"p50 {profile.quantile(0.5):,}, p99 {profile.quantile(0.99):,}"
    counted = f"{100 * profile.counted_frac:.0f} % count"
    paragraph(
        f"{profile.source}: {profile.audit.rows_in:,} rows, {profile.samples.num_tokens:,} tokens "
        f"({lengths}, longest {profile.longest:,}); {counted}; {dropped} dropped",
        hang=2,
    )
    if profile.is_assumption:
        paragraph(f"assumption: counted by {profile.counted_by}", indent=2, hang=2)
    count = f"{training.num_steps:,} step{'' if training.num_steps == 1 else 's'}"
    steps = f"{count} of {training.batch_tokens:,} tokens"
    epochs = f"{training.epochs:g} epoch{'' if training.epochs == 1 else 's'} = "
    write(f"{epochs if training.epochs else ''}{steps}\n")


def _line(each: Answer) -> list[str]:
    name, usable = each.asked.text, each.limit_bytes / _GIBIBYTE
    if each.best is None:
        if each.smallest is None:
            return [name, each.verdict, "", "", "", most_common(each.illegal)]
        peak = f"{each.smallest.peak_bytes / _GIBIBYTE:.1f} of {usable:.1f} GiB"
        term = each.smallest.largest_term
        return [
            name,
            each.verdict,
            "",
            "",
            peak,
            f"memory: {term} {_gib(each.smallest.terms[term])}",
        ]
    peak = f"{each.best.sized.peak_bytes / _GIBIBYTE:.1f} of {usable:.1f} GiB"
    which, share = each.bound
    bound = f"{which} {100 * share:.0f} %"
    return [name, each.verdict, duration(each.hours), dollars(each.dollars), peak, bound]


def _plan(each: Answer) -> str:
    assert each.best is not None
    counts = f"{each.num_fit} of {each.num_plans} legal plans fit"
    alike = f", {each.num_alike} of them within these bars" if each.num_alike > 1 else ""
    others = f"; illegal: {most_common(each.illegal)}" if each.illegal else ""
    return f"{each.best.candidate.describe()} ({counts}{alike}{others})"


def most_common(illegal: Mapping[str, int]) -> str:
    """Reasons with their counts, the most frequent first."""
    ordered = sorted(illegal.items(), key=lambda entry: -entry[1])
    return "; ".join(f"{count} {reason}" for reason, count in ordered)


def _show_comparison(priced: PricedJob) -> None:
    fitting = [each for each in priced.answers if each.fits]
    if len(fitting) > 1:
        fastest = min(fitting, key=lambda each: each.hours[0])
        cheapest = min(fitting, key=lambda each: each.dollars[0])
        text = f"fastest: {fastest.asked.text}; cheapest: {cheapest.asked.text}"
        alike = [
            f"{a.asked.text} and {b.asked.text}"
            for a, b in combinations(fitting, 2)
            if _overlap(a.dollars, b.dollars)
        ]
        text += f"; within each other's bars of cost: {', '.join(alike)}" if alike else ""
        paragraph(text, hang=2)
    host = max(priced.host_bytes(each) for each in fitting)
    paragraph(
        f"disk: weights {_gb(priced.model_bytes)}, checkpoint {_gb(priced.checkpoint_bytes)}; "
        f"host memory to load: {_gib(host)}",
        hang=2,
    )
    bars = {f"{e.efficiency.name}": e.efficiency for e in fitting}
    paragraph(
        "time: roofline over the efficiency of published rows, bars their 10th to 90th percentile "
        f"({'; '.join(f'{n}: {b.num_rows} rows, {b.median:.2f}' for n, b in bars.items())}). "
        "Loading, compiling, evaluation and failures are not in it",
        hang=2,
    )
    write("cost: that time at the list price of the devices alone (--explain: provider and date)\n")


def _overlap(a: Sequence[float], b: Sequence[float]) -> bool:
    """Whether each expected value lies within the other's bar."""
    return b[1] <= a[0] <= b[2] and a[1] <= b[0] <= a[2]


def _show_nearest(nearest: Iterable[Nearest]) -> None:
    write("nearest jobs that fit, each planned as above:\n")
    lines = []
    for each in nearest:
        line = _line(each.answer)
        lines.append([each.flags, line[0], *line[2:5]])
    table(("with", "cluster", "time", "cost", "peak of usable"), lines)


def explain(priced: PricedJob) -> None:
    """Terms of memory and time, rates with their sources, and the job's own values."""
    for each in priced.answers:
        write(f"\n{each.asked.text}\n")
        sized = each.best.sized if each.best else each.smallest
        if sized is not None:
            for name, value in sized.terms.items():
                write(f"  memory, {name}: {format_bytes(value)}\n")
        if each.best is not None:
            for name, value in each.best.seconds.parts.items():
                write(f"  step by the formula, {name}: {1000 * value:.3g} ms\n")
            paragraph(f"efficiency: {each.efficiency.describe()}", indent=2, hang=2)
        for reason, count in each.illegal.items():
            write(f"  illegal, {count}: {reason}\n")
        for name, figure in each.asked.cluster.machine.figures().items():
            origin = f"{figure.kind}, {figure.source}, {figure.date}"
            paragraph(f"{name} = {figure.value:.4g}  ({origin})", indent=2, hang=2)
    write("\n")
    paragraph(f"model: {priced.model.source}", hang=2)
    flops = 2.0 * priced.num_params
    write(f"forward pass of a token, products with weights: {format_flops(flops)}\n")
    for key, value, origin in priced.job.values():
        if origin != "default":
            paragraph(f"{key} = {value}  ({origin})", hang=2)


def duration(hours: Sequence[float]) -> str:
    """Expected, least and most of a job in the unit that a reader would choose."""
    seconds = hours[0] * 3600
    scale, unit = (
        (1.0, "h") if seconds >= 5400 else (60.0, "min") if seconds >= 90 else (3600.0, "s")
    )
    expected, least, most = (figure(each * scale) for each in hours)
    return f"{expected} {unit} ({least} to {most})"


def dollars(values: Sequence[float]) -> str:
    """Expected, least and most; cents, unless there is less than one or far more."""
    digits = 0 if values[0] >= 100 else 2 if values[0] >= 0.1 else 4
    expected, least, most = (f"{each:,.{digits}f}" for each in values)
    return f"${expected} ({least} to {most})"


def figure(value: float) -> str:
    """Two or three digits."""
    if value >= 100:
        return f"{value:,.0f}"
    return f"{value:.1f}"


def _gib(num_bytes: float) -> str:
    return f"{num_bytes / _GIBIBYTE:.1f} GiB"


def _gb(num_bytes: float) -> str:
    scale, unit = (1e12, "TB") if num_bytes >= 1e12 else (1e9, "GB")
    return f"{num_bytes / scale:.3g} {unit}"

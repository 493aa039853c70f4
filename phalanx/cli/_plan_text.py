"""What `phalanx plan` prints of a priced job."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from itertools import combinations

from phalanx.cli._plan_figures import GIBIBYTE, dollars, duration, gb, gib
from phalanx.cli.output import paragraph, table, write
from phalanx.cost.training_plans import SCHEDULES
from phalanx.planner.answers import Answer, PricedPlan
from phalanx.planner.given import Given
from phalanx.planner.largest import Largest
from phalanx.planner.priced_job import PricedJob
from phalanx.planner.profile import DataProfile
from phalanx.planner.search import SAME_TIME_FRAC
from phalanx.planner.sizes import Size
from phalanx.units import format_count

_MATTERS = 0.05  # of a step: what is told
_INTERRUPTIONS = 0.1  # expected in a run: from here on they are told
_CHEAPER = 0.1  # of the price: from here on another one is told
_HEADER = ("cluster", "verdict", "time", "cost", "peak of usable", "bound by")


def show(priced: PricedJob) -> None:
    """The job, a line per cluster, the plans behind them, and what is not in the numbers."""
    _show_job(priced)
    write("\n")
    table(_HEADER, [_line(each, priced) for each in priced.answers])
    write("\n")
    for each, parts, narrow in zip(priced.answers, priced.parts, priced.narrow):
        if each.fits:
            _show_plans(each)
            _show_narrow(each, narrow)
        for line in parts.describe(each) if parts is not None else ():
            paragraph(line, indent=2, hang=2)
    if priced.fits:
        _show_comparison(priced)
    elif priced.nearest:
        _show_nearest(priced)
    elif not any(size.found for size in priced.sizes):
        write("nothing that fits was found near it\n")
    for given in priced.given:
        _show_given(given)
    for size in priced.sizes:
        paragraph(_size(size), hang=2)
    for found in priced.largest:
        paragraph(_largest(found), hang=2)
    for note in priced.notes:
        paragraph(note, hang=2)


def _show_job(priced: PricedJob) -> None:
    training = priced.training
    params, trained = format_count(priced.num_params), format_count(priced.num_trained)
    how = "all are trained (pretrain)" if training.method == "pretrain" else "all are trained"
    if training.lora is not None:
        how = f"LoRA of rank {training.lora.rank} trains {trained}"
    products = f"; products in {training.precision}" if training.precision != "bf16" else ""
    paragraph(f"{priced.model.name}: {params} parameters; {how}{products}", hang=2)
    if training.profile is not None:
        _show_data(training.profile)
    else:
        rows = training.batch_tokens // training.seq_tokens
        plural = "" if rows == 1 else "s"
        write(f"batches of {rows:,} row{plural} of {training.seq_tokens:,} tokens\n")
    count = f"{training.num_steps:,} step{'' if training.num_steps == 1 else 's'}"
    steps = f"{count} of {training.batch_tokens:,} tokens"
    epochs = f"{training.epochs:g} epoch{'' if training.epochs == 1 else 's'} = "
    note = "; time and cost are of this step (--tokens 15T: of a run)" if priced.of_one_step else ""
    write(f"{epochs if training.epochs else ''}{steps}{note}\n")


def _show_data(profile: DataProfile) -> None:
    audit = profile.audit
    dropped = f"{audit.rows_dropped:,}" if audit.rows_dropped else "none"
    lengths = f"p50 {profile.quantile(0.5):,}, p99 {profile.quantile(0.99):,}"
    kept = f"; {profile.held_out:,} more held out" if profile.held_out else ""
    again = f" ({audit.rows_duplicate:,} of them repeat another)" if audit.rows_duplicate else ""
    counted = f"{100 * profile.counted_frac:.0f} % count"
    paragraph(
        f"{profile.source}: {profile.audit.rows_in:,} rows, {profile.samples.num_tokens:,} tokens "
        f"({lengths}, longest {profile.longest:,}); {counted}; {dropped} dropped{again}{kept}",
        hang=2,
    )
    if profile.is_assumption:
        paragraph(f"assumption: counted by {profile.counted_by}", indent=2, hang=2)


def _line(each: Answer, priced: PricedJob) -> list[str]:
    name, usable = each.asked.text, each.limit_bytes / GIBIBYTE
    if each.best is None:
        if each.smallest is None:
            return [name, each.verdict, "", "", "", most_common(each.illegal, 1)]
        peak = f"{each.smallest.peak_bytes / GIBIBYTE:.1f} of {usable:.1f} GiB"
        term = each.smallest.largest_term
        needs = f"memory: {term} {gib(each.smallest.terms[term])}"
        return [name, each.verdict, "", "", peak, needs]
    peak = f"{each.best.sized.peak_bytes / GIBIBYTE:.1f} of {usable:.1f} GiB"
    which, share = each.bound
    return [
        *(name, each.verdict, duration(each.hours), dollars(each.dollars), peak),
        f"{which} {100 * share:.0f} %",
    ]


def _show_plans(each: Answer) -> None:
    """The plan to take, and beside it what is faster or what the trainer runs."""
    best, fastest, runnable = each.best, each.fastest, each.runnable
    assert best is not None and fastest is not None
    counts = f"{each.num_fit:,} of {each.num_plans:,} legal plans fit"
    if each.num_listed:
        counts += f", the most promising of some {each.num_listed:,}"
    alike = f", {each.num_alike:,} of them within these bars" if each.num_alike > 1 else ""
    count = sum(each.illegal.values())
    others = (
        f"; {count:,} illegal, most {max(each.illegal, key=lambda reason: each.illegal[reason])}"
        if count
        else ""
    )
    only = f" [simulated only: {', '.join(best.sized.missing)}]" if best.sized.missing else ""
    text = f"{each.asked.text}: {best.sized.describe()}{only} ({counts}{alike}{others})"
    paragraph(text, hang=2)
    if best is not fastest and fastest.total_s < (1 - _MATTERS) * best.total_s:
        words, less = fastest.sized.describe(), 1 - fastest.total_s / best.total_s
        paragraph(
            f"within its bars, simulated only ({', '.join(fastest.sized.missing)}): {words}; "
            f"{100 * less:.0f} % less time",
            indent=2,
            hang=2,
        )
    if each.unproven is not None and each.unproven.total_s < (1 - _MATTERS) * best.total_s:
        schedule = SCHEDULES[int(each.unproven.sized.row["schedule"])]
        less = 1 - each.unproven.total_s / best.total_s
        paragraph(
            f"by formula alone, no published run of {schedule} to compare with: "
            f"{each.unproven.sized.describe()}; {100 * less:.0f} % less time",
            indent=2,
            hang=2,
        )
    if runnable is not best and each.training.config is not None:
        words = "no plan that fits"
        if runnable is not None:
            more = runnable.total_s / best.total_s
            words = f"{runnable.sized.describe()}; {more:.2g} times as long"
        paragraph(f"what `phalanx train` runs: {words}", indent=2, hang=2)
    shares = sorted(best.shares().items(), key=lambda share: -share[1])
    spent = [f"{name} {100 * share:.0f} %" for name, share in shares if share >= _MATTERS]
    text = f"a step is {', '.join(spent)}"
    if each.memory_gain > _MATTERS:
        percent, term = f"{100 * each.memory_gain:.0f} %", best.sized.largest_term
        text += f"; memory binds ({term}): {percent} less time with room for all plans"
    if len(spent) > 1 or each.memory_gain > _MATTERS:
        paragraph(text, indent=2, hang=2)


def _show_narrow(each: Answer, narrow: PricedPlan | None) -> None:
    """What fp8 products would save; the numbers that come out are others."""
    assert each.best is not None
    if narrow is not None and narrow.total_s < (1 - _MATTERS) * each.best.total_s:
        less, peak = 1 - narrow.total_s / each.best.total_s, gib(narrow.sized.peak_bytes)
        text = f"the same plan with fp8 products: {100 * less:.0f} % less time, {peak}"
        paragraph(f"{text} [simulated only; other numerics; --precision fp8]", indent=2, hang=2)


def most_common(illegal: Mapping[str, int], at_most: int = 99) -> str:
    """Reasons with their counts, the most frequent first."""
    ordered = sorted(illegal.items(), key=lambda entry: -entry[1])
    found = [f"{count:,} {reason}" for reason, count in ordered[:at_most]]
    rest = sum(count for _, count in ordered[at_most:])
    return "; ".join([*found, f"{rest:,} for other reasons"] if rest else found)


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
    for each in fitting:
        _show_rented(each, priced)
    host = max(priced.host_bytes(each) for each in fitting)
    states = [
        f"{each.asked.text} {gib(away)}" for each in fitting if (away := priced.host_states(each))
    ]
    kept = f", for moments of each host: {', '.join(states)}" if states else ""
    paragraph(
        f"disk: weights {gb(priced.model_bytes)}, checkpoint {gb(priced.checkpoint_bytes)}; "
        f"host memory to load: {gib(host)}{kept}",
        hang=2,
    )
    fitted = "fitted to published rows" if "fitted" in fitting[0].source else "with assumed rates"
    paragraph(
        f"time: formula {fitted}, with 90 % bars (--explain: which). "
        "Loading, compiling, evaluation and failures are not in it",
        hang=2,
    )
    if any(each.asked.cluster.machine.price is not None for each in fitting):
        cheaper = [text for each in fitting if (text := _cheaper(each, priced))]
        paragraph(
            "cost: that time at the list price of the devices alone (--explain: provider and date)"
            + (f"; elsewhere for less: {'; '.join(cheaper)}" if cheaper else ""),
            hang=2,
        )


def _show_rented(each: Answer, priced: PricedJob) -> None:
    """Where a run is long enough to be interrupted: what that leaves, on demand and on spot."""
    runs = [run for run in priced.rented(each) if run.interruptions >= _INTERRUPTIONS]
    told = [
        f"{run.rental.terms} ({run.rental.source.split()[0]}) {dollars(tuple(run.usd))} in "
        f"{duration(tuple(run.hours))}, {100 * run.goodput_frac.value:.1f} % of it training"
        for run in runs
    ]
    if told:
        paragraph(f"{each.asked.text} with failures and restarts: {'; '.join(told)}", hang=2)


def _cheaper(each: Answer, priced: PricedJob) -> str:
    """A run of dollars that is hardly ever interrupted, where devices cost clearly less."""
    most = (1 - _CHEAPER) * each.dollars[0]
    runs = [
        f"{dollars(tuple(run.usd)).partition(' (')[0]} {run.rental.terms}"
        for run in priced.rented(each)
        if run.interruptions < _INTERRUPTIONS and 1.0 <= each.dollars[0] and run.usd.value < most
    ]
    return f"{each.asked.text} {', '.join(runs)}" if runs else ""


def _overlap(a: Sequence[float], b: Sequence[float]) -> bool:
    """Whether each expected value lies within the other's bar."""
    return b[1] <= a[0] <= b[2] and a[1] <= b[0] <= a[2]


def _show_nearest(priced: PricedJob) -> None:
    write("nearest jobs that fit, each planned as above:\n")
    lines = []
    for each in priced.nearest:
        line = _line(each.answer, priced)
        lines.append([each.flags, line[0], *line[2:5]])
    table(("with", "cluster", "time", "cost", "peak of usable"), lines)


def _show_given(given: Given) -> None:
    """What the file's plan takes, and what to change of it."""
    where = f"{given.answer.asked.text}: the file's plan"
    if given.plan is None:
        paragraph(f"{where}: {given.changes[0]}", hang=2)
        return
    sized, best = given.plan.sized, given.answer.best
    limit = given.answer.limit_bytes / GIBIBYTE
    verdict = "fits" if given.fits else "does not fit"
    if sized.host_bytes > given.host_limit_bytes:
        host = f"{gib(sized.host_bytes)} of {gib(given.host_limit_bytes)}"
        verdict += f" into host memory ({host} a device)"
    elif sized.host_bytes:
        verdict += f" with {gib(sized.host_bytes)} of host memory a device"
    taken = f"a step of {given.step_tokens:,} tokens" if given.has_other_batch else "a step"
    step = duration([s / 3600 for s in (given.plan.total_s, given.plan.low_s, given.plan.high_s)])
    paragraph(
        f"{where} {verdict}, {sized.peak_bytes / GIBIBYTE:.1f} of {limit:.1f} GiB, {taken} takes "
        f"{step}: {sized.describe()}",
        hang=2,
    )
    if best is not None and given.changes:
        less, changes = given.gain_frac, "; ".join(given.changes)
        gain = f"{100 * less:.0f} % less time{' a token' if given.has_other_batch else ''}"
        text = f"change {f'for {gain}' if given.fits else 'to fit'}: {changes}"
        if given.fits and less <= SAME_TIME_FRAC:
            gain = f"{-100 * less:.0f} % more time" if less < 0 else gain
            text = f"nothing to change: no plan takes less time ({changes}: {gain})"
        paragraph(text, indent=2, hang=2)


def _size(size: Size) -> str:
    machine = size.asked.asked.cluster.machine.name
    if size.found is None:
        return f"{machine}: {size.why_not}"
    found = size.found
    assert found.best is not None
    sized, number = found.best.sized, found.asked.cluster.num_devices
    only = f" [simulated only: {', '.join(sized.missing)}]" if sized.missing else ""
    return (
        f"{machine}: {number:,} device{'' if number == 1 else 's'} would do, in "
        f"{duration(found.hours)}, {dollars(found.dollars)}: {sized.describe()}{only}"
    )


def _largest(found: Largest) -> str:
    where = f"{found.asked.asked.text}: largest {found.what}"
    if not found.tokens or found.plan is None:
        return f"{where}: none fits"
    text = f"{where} {found.tokens:,} tokens ({found.plan.describe()})"
    if found.plan.missing:
        text += ", simulated only; "
        plan = found.runnable_plan
        if plan is not None:
            text += f"by `phalanx train` {found.runnable_tokens:,} ({plan.describe()})"
        else:
            text += "none that `phalanx train` runs"
    return f"{text}; {found.note}" if found.note else text

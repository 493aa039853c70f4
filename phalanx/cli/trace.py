"""`phalanx trace slow|diverge|reference`: who is late; where two runs part; is it rounding?"""

from __future__ import annotations

from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from phalanx.cli.app import group
from phalanx.cli.output import JsonFile, emit, table, versioned, write
from phalanx.errors import JobError

if TYPE_CHECKING:
    from phalanx.analyze.first_divergence import Difference, Divergence
    from phalanx.analyze.slow_rank import SlowSearch
    from phalanx.mesh import Mesh

_MS = 1e3
_SHOWN = 16  # differences


def register(app: typer.Typer) -> None:
    """Add the verb."""
    verbs = group(
        app, "trace", "Questions asked of runs: who is slow, where do two part, is it rounding."
    )
    verbs.command("slow")(slow)
    verbs.command("diverge")(diverge)
    verbs.command("reference")(reference)


def slow(
    run: Annotated[
        str, typer.Argument(metavar="RUN", help="Run folder with profiled steps, or a .npz trace.")
    ],
    mesh: Annotated[
        str, typer.Option("--mesh", help="Axes of the ranks, outermost first: cp=2,tp=4.")
    ] = "",
    axes: Annotated[
        str, typer.Option("--axes", help="Order of the search (replicate,shard,pp,cp,tp).")
    ] = "",
    json_file: JsonFile = "",
) -> None:
    """Find the rank that the others wait for, from the outermost axis to the innermost.

    A run has the rows that are needed where steps were profiled:

    \b
    phalanx train --model M --data D --folder RUN --plan.profile_steps 5
    phalanx trace slow RUN
    """
    from phalanx.analyze.slow_rank import find_slow
    from phalanx.trace import Trace

    path = Path(run)
    if not path.exists():
        raise JobError("job/not-found", "RUN", run, "is neither a run folder nor a trace file")
    grid = _mesh(mesh) if mesh or not path.is_dir() else _mesh_of_run(run)
    found = find_slow(
        Trace.load(path / "trace.npz" if path.is_dir() else path),
        grid,
        [name.strip() for name in axes.split(",") if name.strip()],
    )
    emit(versioned("slow", **asdict(found)), json_file, lambda: _show_slow(found, grid))


def _mesh_of_run(run: str) -> Mesh:
    from phalanx.engines.run_folder import read_run

    return read_run(run)[1].program("train").grid()


def _mesh(text: str) -> Mesh:
    """The mesh of "cp=2,tp=4"."""
    from phalanx.mesh import Mesh

    axes: dict[str, int] = {}
    for part in filter(None, text.split(",")):
        name, _, size = part.partition("=")
        if not size.strip().isdecimal():
            raise JobError("mesh/axis", "--mesh", text, "is not AXIS=SIZE,...", legal=["cp=2,tp=4"])
        if name.strip() in axes:
            raise JobError("mesh/axis", "--mesh", text, f"has the axis {name.strip()} twice")
        axes[name.strip()] = int(size)
    if not axes:
        rule = "a trace file does not say how its ranks stand"
        raise JobError("job/missing", "--mesh", None, rule, legal=["--mesh cp=2,tp=4"])
    return Mesh(axes)


def _show_slow(found: SlowSearch, mesh: Mesh) -> None:
    lines = [
        [
            level.axis,
            ", ".join(f"{wait_s * _MS:.3g}" for wait_s in level.waits_s),
            "none stands out" if level.late < 0 else f"{level.axis} {level.late}",
            f"{level.lead_s * _MS:.3g}",
            f"{level.votes:.0%}",
        ]
        for level in found.levels
    ]
    table(("axis", "waits by coordinate, ms", "late", "lead, ms", "steps that agree"), lines)
    if not found.suspects:
        write("\nno rank is waited for\n")
        return
    ranks = ", ".join(map(str, found.suspects))
    stands = ", ".join(f"{level.axis} {level.late}" for level in found.levels if level.late >= 0)
    share = found.cost_s / found.step_s if found.step_s else 0.0
    write(
        f"\nslow: rank{'s' * (len(found.suspects) > 1)} {ranks} ({stands}): the others wait "
        f"{found.cost_s * _MS:.3g} ms of a step of {found.step_s * _MS:.4g} ms ({share:.0%})\n"
    )


def diverge(
    run_a: Annotated[str, typer.Argument(metavar="RUN_A", help="Run folder.")],
    run_b: Annotated[str, typer.Argument(metavar="RUN_B", help="Another one.")],
    tolerance: Annotated[
        float,
        typer.Option("--tolerance", min=0.0, help="What rounding explains (0: by the dtype)."),
    ] = 0.0,
    json_file: JsonFile = "",
) -> None:
    """Find the first step, layer and phase in which two runs differ, on whatever layouts.

    Both runs recorded their first steps:

    \b
    phalanx train ... --folder A --plan.record_steps 2
    phalanx train ... --folder B --plan.record_steps 2 --plan.mesh.tp 2
    phalanx trace diverge A B

    Exit 0: equal, or apart by no more than rounding explains; 1: further apart, or one of the runs
    has layers or weights that the other lacks.
    """
    from phalanx.analyze.first_divergence import compare, read_recorded

    found = compare(read_recorded(run_a), read_recorded(run_b), tolerance)
    document = versioned(
        "divergence",
        first=_table(found.first),
        first_large=_table(found.first_large),
        **asdict(found),
    )
    emit(document, json_file, lambda: _show_divergence(found))
    if not found.is_rounding:
        raise typer.Exit(1)


def reference(
    run: Annotated[str, typer.Argument(metavar="RUN", help="Run folder with recorded steps.")],
    json_file: JsonFile = "",
) -> None:
    """Compute a run's first step again in one process that adds in the run's order.

    For pipelines and replicas (two at most): every activation, gradient and weight must then be
    equal bit by bit. If it is, the run differs from a plain one by rounding alone.

    \b
    phalanx train ... --folder RUN --plan.mesh.pp 2 --plan.record_steps 1
    phalanx trace reference RUN

    Exit 0: equal bit for bit; 1: it differs, and where first.
    """
    from phalanx.engines.reference_run import against_reference

    found = against_reference(run)
    document = versioned("reference", first=_table(found.first), **asdict(found))
    emit(document, json_file, lambda: _show_divergence(found, ("run", "reference")))
    if found.first is not None or found.only:
        raise typer.Exit(1)


def _table(difference: Difference | None) -> dict | None:
    return None if difference is None else asdict(difference)


def _show_divergence(found: Divergence, names: tuple[str, str] = ("A", "B")) -> None:
    from phalanx.analyze.first_divergence import PHASES

    if found.only:
        write(f"only one of the runs has {', '.join(found.only[:8])}\n")
    if found.first is None:
        write(f"equal bit for bit at {found.num_places} places\n")
        return
    shown = found.differences[:_SHOWN]
    large = found.first_large
    if large is not None and large not in shown:
        shown = (*shown[: _SHOWN // 2], large)
    lines = [
        [
            f"{each.step}",
            PHASES[each.phase],
            each.name,
            f"{each.distance:.2g}",
            f"{each.norms[0]:.6g}",
            f"{each.norms[1]:.6g}",
        ]
        for each in shown
    ]
    table(
        ("step", "phase", "where", "relative difference", *(f"norm in {n}" for n in names)), lines
    )
    num_equal = found.num_places - len(found.differences)
    write(f"\n{num_equal} of {found.num_places} places are equal bit for bit\n")
    write(f"first difference: {_words(found.first, names)}\n")
    allowed = f"{found.tolerance:g} (weights behind an update {found.weight_tolerance:.2g})"
    if large is None:
        write(f"none is above {allowed}, which rounding explains\n")
    else:
        write(f"first above {allowed}: {_words(large, names)}\n")


def _words(each: Difference, names: tuple[str, str]) -> str:
    from phalanx.analyze.first_divergence import PHASES

    place = f"step {each.step}, {PHASES[each.phase]} of {each.name}"
    if each.counts[0] == each.counts[1]:
        return f"{place}, {each.distance:.2g} of its norm"
    counts = (f"{count} elements in {name}" for count, name in zip(each.counts, names))
    return f"{place}: {', '.join(counts)}"

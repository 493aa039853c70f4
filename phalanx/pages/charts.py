"""Curves of training, and the memory of a process term by term."""

from __future__ import annotations

from typing import Any

from phalanx.pages.canvas import BLUE, GREEN, GREY, ORANGE, PINK, RED, SKY, Theme, new_axes
from phalanx.pages.content import Curves, MemoryStack
from phalanx.pages.shown import percent, shown

_MARKED = 60  # lines of more points have no marks, and stay small files
_TOLD = 8  # of more evaluations only the first, the lowest and the last are told
_TERM_COLOURS = (BLUE, SKY, GREEN, ORANGE, PINK, RED, GREY)


def losses(curves: Curves, theme: Theme) -> Any:
    figure, axes = new_axes(theme, 6.4, 3.1)
    axes.plot(curves.steps, curves.losses, color=SKY, lw=1.1, label="training rows")
    if curves.held_out:
        steps, losses = zip(*curves.held_out)
        style = "o-" if len(steps) <= _MARKED else "-"
        axes.plot(steps, losses, style, color=BLUE, lw=2.0, ms=5, label="held-out rows")
        falls = losses[-1] <= losses[0]
        for at, align, above in ((0, "left", falls), (-1, "right", not falls)):
            axes.annotate(
                f"{losses[at]:.3f}", (steps[at], losses[at]), xytext=(0, 7 if above else -14),
                ha=align, textcoords="offset points", color=theme.ink, fontsize=9,
            )  # fmt: skip
    axes.set_xlabel("optimizer step")
    axes.set_ylabel("nats per counted token")
    axes.margins(x=0.02, y=0.16)
    axes.grid(axis="y", color=theme.rule, lw=0.6)
    axes.legend(loc="upper right", labelcolor=theme.ink)
    return figure


def loss_alt(curves: Curves) -> str:
    parts = [f"Training loss from {curves.losses[0]:.4f} at step {curves.steps[0]} "
             f"to {curves.losses[-1]:.4f} at step {curves.steps[-1]}"]  # fmt: skip
    if curves.held_out:
        chosen = list(curves.held_out)
        if len(chosen) > _TOLD:
            lowest = min(chosen, key=lambda each: each[1])
            chosen = [each for each in chosen if each in (chosen[0], lowest, chosen[-1])]
        told = ", ".join(f"{loss:.4f} after step {step:.0f}" for step, loss in chosen)
        parts.append(f"held-out loss {told}")
    return "; ".join(parts) + "."


def speed(curves: Curves, theme: Theme) -> Any:
    figure, axes = new_axes(theme, 6.4, 2.5)
    style = "o-" if len(curves.steps) <= _MARKED else "-"
    axes.plot(
        curves.steps, curves.tokens_per_s, style, color=BLUE, lw=1.2, ms=2.5, label="measured"
    )
    if curves.predicted_tokens_per_s:
        axes.axhline(
            curves.predicted_tokens_per_s, color=ORANGE, lw=1.6, ls=(0, (5, 3)), label="predicted"
        )
    axes.set_xlabel("optimizer step")
    axes.set_ylabel("tokens per second")
    axes.set_ylim(0, 1.25 * max(*curves.tokens_per_s, curves.predicted_tokens_per_s or 0.0))
    axes.margins(x=0.02)
    axes.grid(axis="y", color=theme.rule, lw=0.6)
    axes.legend(loc="lower right", labelcolor=theme.ink, ncols=2)
    return figure


def speed_alt(curves: Curves) -> str:
    found = sorted(curves.tokens_per_s)
    told = f"Between {found[0]:,.0f} and {found[-1]:,.0f} tokens per second, "
    told += f"{found[len(found) // 2]:,.0f} in the middle"
    if curves.predicted_tokens_per_s:
        told += f"; {curves.predicted_tokens_per_s:,.0f} were predicted"
    return told + "."


# ---- memory --------------------------------------------------------------------------------------


def memory_stack(memory: MemoryStack, theme: Theme) -> Any:
    figure, axes = new_axes(theme, 6.4, 2.6)
    unit = shown(sum(memory.terms.values()), "bytes").unit
    scale = {"TiB": 2.0**40, "GiB": 2.0**30, "MiB": 2.0**20, "KiB": 2.0**10, "B": 1.0}[unit]
    left = 0.0
    for at, (name, value) in enumerate(_largest_first(memory)):
        colour = _TERM_COLOURS[at % len(_TERM_COLOURS)]
        hatch = "" if at < len(_TERM_COLOURS) else "////"
        label = f"{name} {shown(value, 'bytes')}"
        axes.barh(
            1, value / scale, left=left, height=0.55, color=colour, edgecolor=theme.paper,
            lw=0.6, hatch=hatch, label=label,
        )  # fmt: skip
        left += value / scale
    measured = memory.measured_bytes / scale
    axes.barh(0, measured, height=0.3, color=theme.muted)
    for at, total in ((1, left), (0, measured)):
        axes.annotate(
            str(shown(total * scale, "bytes")), (total, at), xytext=(5, 0), va="center",
            textcoords="offset points", color=theme.ink,
        )  # fmt: skip
    limit, longest = memory.limit_bytes / scale, max(left, measured)
    if 0.0 < limit <= 4.0 * longest:
        axes.axvline(limit, color=RED, lw=1.8)
        axes.annotate(
            f"{memory.limit_name} {shown(memory.limit_bytes, 'bytes')}", (limit, 1.45),
            xytext=(-5, 0), ha="right", textcoords="offset points", color=RED,
        )  # fmt: skip
        longest = max(longest, limit)
    axes.set_yticks([1, 0], ["predicted", "measured"], color=theme.ink)
    axes.set_ylim(-0.5, 1.7)
    axes.set_xlim(0, longest * 1.15)
    axes.set_xlabel(f"{unit} of one process")
    axes.spines["left"].set_visible(False)
    axes.tick_params(axis="y", length=0)
    figure.legend(loc="outside lower left", ncols=3, labelcolor=theme.ink, fontsize=8.5)
    return figure


def _largest_first(memory: MemoryStack) -> list[tuple[str, float]]:
    """The terms that there are; what is nothing is neither drawn nor told."""
    terms = [term for term in memory.terms.items() if term[1] > 0.0]
    return sorted(terms, key=lambda term: -term[1])


def memory_alt(memory: MemoryStack) -> str:
    told = ", ".join(f"{name} {shown(value, 'bytes')}" for name, value in _largest_first(memory))
    total = shown(sum(memory.terms.values()), "bytes")
    return (
        f"Predicted for one process: {total} = {told}. "
        f"Measured peak: {shown(memory.measured_bytes, 'bytes')}."
    )


def memory_caption(memory: MemoryStack) -> str:
    told = "Memory of one process at the peak of a step, above what its libraries take: predicted "
    told += "term by term, and measured (mean over processes)."
    if not memory.limit_bytes:
        return told
    share = max(sum(memory.terms.values()), memory.measured_bytes) / memory.limit_bytes
    limit = f"{memory.limit_name} ({shown(memory.limit_bytes, 'bytes')})"
    return f"{told} The larger of the two is {percent(share, signed=False)} of the {limit}."

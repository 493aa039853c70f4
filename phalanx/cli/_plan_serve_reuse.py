"""What `phalanx plan --serve` says of prompts that begin alike."""

from __future__ import annotations

from typing import Any

from phalanx.cli._plan_serve_words import per_s, share_words, time_words
from phalanx.planner.serve_answers import Engines, ServeAnswer, ServeQuestion

OFF = "prefix reuse is off: every prompt is computed whole"


def asked_words(question: ServeQuestion) -> str:
    """Which tokens prompts share; "" where that is not known."""
    if question.requests is None:
        shared = question.shared_tokens
        return f", the first {shared:,} of each prompt the same in all" if shared else ""
    named = question.requests.prefixes
    if named is None:
        return ""
    return f", prompts that begin alike named in blocks of {named.block_tokens:,} tokens"


def reuse_words(answer: ServeAnswer, question: ServeQuestion) -> str:
    """How much is reused, and what that changes by the formulas; "" where nothing could be."""
    if question.names_prefixes and not question.reuses_prefixes:
        return OFF
    before, best = answer.without_reuse, answer.best
    if before is None or before.best is None or best is None:
        return ""
    said = f"prefix reuse: {share_words(answer.reused_tokens / question.prompt_tokens)} of prompt "
    said += "tokens cached in the formulas"
    if answer.played is not None:
        turns = ", engines taking turns" if best.replicas > 1 and question.requests else ""
        said += f", {share_words(answer.played.reused_frac)} as played{turns}"
    said += (
        f"; these engines without it (formula): knee at {per_s(before.best.knee_per_s)} instead of "
        f"{per_s(best.knee_per_s)} requests/s, TTFT {_first_token(before.best)} instead of "
        f"{_first_token(best)}"
    )
    if question.asked_per_s:
        few, many = (each.engines_for(question.asked_per_s) for each in (answer, before))
        instead = f" instead of {many:,}" if many > few else ""
        said += f"; {few:,} of them carry the load{instead}"
    return said


def reuse_table(answer: ServeAnswer, question: ServeQuestion) -> dict[str, Any] | None:
    """For machines; None where no prompt is known to begin like another."""
    if not question.names_prefixes or answer.best is None:
        return None
    before = answer.without_reuse
    found: dict[str, Any] = {"on": before is not None}
    if before is None or before.best is None:
        return found
    found["formula_frac"] = answer.reused_tokens / question.prompt_tokens
    if answer.played is not None:
        found["played_frac"] = answer.played.reused_frac
    found["without"] = {
        "ttft_s": before.best.ttft_s.value,
        "at_per_s": before.best.loaded,
        "knee_per_s": before.best.knee_per_s,
        "most_per_s": before.best.most_per_s,
    }
    if question.asked_per_s:
        found["engines"] = answer.engines_for(question.asked_per_s)
        found["without"]["engines"] = before.engines_for(question.asked_per_s)
    return found


def _first_token(best: Engines) -> str:
    return f"{time_words(best.ttft_s.value)} at {per_s(best.loaded)} requests/s"

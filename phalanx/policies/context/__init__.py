"""Which rank has which tokens of a row, and what attention exchanges for it.

Rules of the rows (pattern ""), whose placement is a layout of tokens (`layout.token_layout`), and
of attention blocks, whose placement is the way in which queries meet keys: "ring", "all_gather",
"all_to_all" (of heads) or "wanted" (only keys that are seen). Blocks with a sliding window are
asked for as "<block>.window" first.
"""

from __future__ import annotations

from phalanx.errors import PlanError, nearest_names
from phalanx.layout.token_layout import LAYOUTS
from phalanx.policy import Exchange, Rule

ATTENTION = "*.self_attn"
ROWS = ""


def tokens_rule(layout: str) -> Rule:
    """The rule of the rows.

    Raises:
        PlanError: `plan/illegal` for a layout that does not exist.
    """
    if layout not in LAYOUTS:
        legal = nearest_names(layout, LAYOUTS) or list(LAYOUTS)
        raise PlanError("plan/illegal", "plan.context.layout", layout, "is no layout", legal=legal)
    return Rule(pattern=ROWS, placement=layout)


def halo_rules(halo: bool) -> tuple[Rule, ...]:
    """The rule of attention with a window, where it exchanges only the keys that are seen."""
    exchanges = tuple(
        Exchange(collective="all_to_all", phase=phase, at=at, of="keys_values")
        for phase, at in (("F", "before"), ("B", "after"))
    )
    rule = Rule(pattern=f"{ATTENTION}.window", placement="wanted", exchanges=exchanges)
    return (rule,) if halo else ()

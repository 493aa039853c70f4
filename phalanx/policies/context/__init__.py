"""Which rank has which tokens of a row, and what attention exchanges for it.

Two rules each: of the rows (pattern ""), whose placement is a layout of tokens
(`layout.token_layout`), and of attention blocks, whose placement is the way in which queries meet
keys: "ring", "all_gather" or "all_to_all".
"""

from __future__ import annotations

from phalanx.errors import PlanError, nearest_names
from phalanx.layout.token_layout import LAYOUTS
from phalanx.policy import Rule

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

"""A plan in words."""

from __future__ import annotations

from collections.abc import Mapping

from phalanx.cost.training_plans import CONTEXT_KINDS, RECOMPUTE, SCHEDULES

_KINDS = {"all-gather": "gathered keys", "ring": "a ring", "ulysses": "heads exchanged"}
_STATES = {1: "moments", 2: "gradients and moments"}


def plan_words(row: Mapping[str, float], row_limit: float) -> str:
    """In a line: axes, what is sharded, micro-batches, what is computed again.

    Args:
        row: columns of `TrainingPlans`.
        row_limit: tokens of the longest row of a micro-batch.
    """
    at = {name: int(value) for name, value in row.items()}
    parts = [_tensor(at), _context(at), _pipeline(at), _experts(at), *_data(at)]
    parts.append(f"micro-batches of {row_limit:,.0f} tokens")
    if at["recompute"]:
        parts.append(f"{RECOMPUTE[at['recompute']]} recomputation")
    if row["offload"]:
        parts.append("moments in host memory")
    return "; ".join(each for each in parts if each)


def _tensor(at: Mapping[str, int]) -> str:
    kind = "tensor + sequence" if at["sequence_parallel"] else "tensor"
    return f"{kind} parallel over {at['tensor']}" if at["tensor"] > 1 else ""


def _context(at: Mapping[str, int]) -> str:
    kind = _KINDS[CONTEXT_KINDS[at["context_kind"]]]
    return f"context over {at['context']} ({kind})" if at["context"] > 1 else ""


def _pipeline(at: Mapping[str, int]) -> str:
    if at["pipeline"] == 1:
        return ""
    chunks = f", {at['virtual']} chunks each" if at["virtual"] > 1 else ""
    return f"pipeline of {at['pipeline']} ({SCHEDULES[at['schedule']]}{chunks})"


def _experts(at: Mapping[str, int]) -> str:
    if at["expert"] == 1:
        return ""
    cut = f", each over {at['expert_tensor']}" if at["expert_tensor"] > 1 else ""
    return f"experts over {at['expert']}{cut}"


def _data(at: Mapping[str, int]) -> list[str]:
    ranks, shard = at["data"] * at["context"], at["shard"]
    if ranks == 1:
        return [] if at["tensor"] * at["pipeline"] > 1 else ["one device"]
    if at["zero"] == 3:
        kept = ", kept gathered" if at["keeps_gathered"] else ""
        copies = f"{ranks // shard} replicas of " if shard < ranks else ""
        return [f"{copies}FSDP over {shard}{kept}"]
    found = [f"{at['data']} replicas"] if at["data"] > 1 else []
    if at["zero"]:
        found.append(f"{_STATES[at['zero']]} over {shard} (ZeRO {at['zero']})")
    return found

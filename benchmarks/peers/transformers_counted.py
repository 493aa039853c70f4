"""The transformers + peft loop with the head at counted positions only: the peer to beat."""

from __future__ import annotations

from collections.abc import Callable

import torch

from peers.case import Case
from peers.transformers_peft import adapted_model, inputs_of, optimizer_of

NAME = "transformers + peft, head at counted positions"
NUM_PROCESSES = 1


def build(case: Case, autocast_adapters: bool = True) -> Callable[[int], None]:
    """A step: every row forward and backward, clipping, update."""
    model = adapted_model(case, autocast_adapters)
    optimizer = optimizer_of(model)
    causal = model.get_base_model()

    def step(number: int) -> None:
        for row in case.rows(number):
            hidden_SD = causal.model(**inputs_of(row), use_cache=False).last_hidden_state[0]
            logits_NV = causal.lm_head(hidden_SD[torch.from_numpy(row.counted_N)])
            targets_N = torch.from_numpy(row.targets_N)
            loss = torch.nn.functional.cross_entropy(logits_NV.float(), targets_N, reduction="sum")
            (loss / case.num_counted(number)).backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad()

    return step

"""A plain transformers + peft loop: the model computes all logits and the loss."""

from __future__ import annotations

from collections.abc import Callable

import torch
from peft import LoraConfig, get_peft_model
from transformers import AutoModelForCausalLM

from peers.case import LEARNING_RATE, RANK, TARGETS, Case, Row

NAME = "transformers + peft, all logits"
NUM_PROCESSES = 1


def adapted_model(case: Case, autocast_adapters: bool = True) -> torch.nn.Module:
    """The model with adapters; float32 ones, as peft makes them by default."""
    model = AutoModelForCausalLM.from_pretrained(case.model, dtype=torch.bfloat16)
    lora = LoraConfig(r=RANK, lora_alpha=2 * RANK, target_modules=list(TARGETS))
    model = get_peft_model(model, lora, autocast_adapter_dtype=autocast_adapters)
    return model.train()


def optimizer_of(model: torch.nn.Module) -> torch.optim.Optimizer:
    """AdamW over what is trained."""
    trained = [parameter for parameter in model.parameters() if parameter.requires_grad]
    return torch.optim.AdamW(trained, lr=LEARNING_RATE, fused=True)


def inputs_of(row: Row) -> dict[str, torch.Tensor]:
    """A packed row as transformers takes it: positions that restart keep documents apart."""
    return {
        "input_ids": torch.from_numpy(row.tokens_S)[None],
        "position_ids": torch.from_numpy(row.positions_S)[None],
    }


def build(case: Case) -> Callable[[int], None]:
    """A step: every row forward and backward, clipping, update."""
    model = adapted_model(case)
    optimizer = optimizer_of(model)

    def step(number: int) -> None:
        for row in case.rows(number):
            logits_SV = model(**inputs_of(row), use_cache=False).logits[0]
            labels_S = torch.from_numpy(row.labels_S)
            loss = torch.nn.functional.cross_entropy(logits_SV.float(), labels_S, reduction="sum")
            (loss / case.num_counted(number)).backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad()

    return step

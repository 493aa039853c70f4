"""TRL's SFTTrainer as it comes: padded batches of 8 documents, gradient checkpointing, bfloat16.

Targets are given by a completion mask. Its steps hold whole batches, so nearly but not exactly the
tokens of the case; padding does not count.
"""

from __future__ import annotations

import queue
import tempfile
import threading
from collections.abc import Callable
from itertools import pairwise

import torch
from datasets import Dataset
from peft import LoraConfig
from transformers import AutoModelForCausalLM, AutoTokenizer, TrainerCallback
from trl import SFTConfig, SFTTrainer

from peers.case import LEARNING_RATE, RANK, TARGETS, Case

NAME = "TRL SFTTrainer, defaults"
NUM_PROCESSES = 1
_BATCH = 8


def build(case: Case) -> Callable[[int], None]:
    """The trainer runs in a thread of its own and does a step whenever it is asked."""
    documents = [list(_documents(case, number)) for number in range(len(case.steps))]
    accumulate = max(1, min(map(len, documents)) // _BATCH)
    taken = [each[: accumulate * _BATCH] for each in documents]
    turns = _Turns()
    config = SFTConfig(
        output_dir=tempfile.mkdtemp(),
        per_device_train_batch_size=_BATCH,
        gradient_accumulation_steps=accumulate,
        max_steps=10_000,
        learning_rate=LEARNING_RATE,
        use_cpu=True,
        report_to="none",
        save_strategy="no",
        disable_tqdm=True,
        shuffle_dataset=False,
        dataloader_num_workers=0,
    )
    trainer = _InOrder(
        model=AutoModelForCausalLM.from_pretrained(case.model, dtype=torch.bfloat16),
        args=config,
        train_dataset=Dataset.from_list([row for step in taken for row in step]),
        processing_class=AutoTokenizer.from_pretrained(case.model),
        peft_config=LoraConfig(r=RANK, lora_alpha=2 * RANK, target_modules=list(TARGETS)),
        callbacks=[turns],
    )
    threading.Thread(target=trainer.train, daemon=True).start()

    def step(number: int) -> None:
        turns.asked.put(number)
        turns.done.get()

    step.work = lambda number: (  # type: ignore[attr-defined]
        sum(len(row["input_ids"]) for row in taken[number % len(taken)]),
        sum(sum(row["completion_mask"]) for row in taken[number % len(taken)]),
    )
    return step


class _InOrder(SFTTrainer):
    def _get_train_sampler(self, dataset=None):
        return torch.utils.data.SequentialSampler(self.train_dataset)


class _Turns(TrainerCallback):
    """Holds the trainer until a step is asked for."""

    def __init__(self) -> None:
        self.asked: queue.Queue[int] = queue.Queue()
        self.done: queue.Queue[None] = queue.Queue()

    def on_step_begin(self, args, state, control, **kwargs):
        """Before a step."""
        self.asked.get()

    def on_step_end(self, args, state, control, **kwargs):
        """After it."""
        self.done.put(None)


def _documents(case: Case, number: int):
    for row in case.rows(number):
        counted = set((row.counted_N + 1).tolist())
        for start, end in pairwise((*row.document_starts, len(row.tokens_S))):
            yield {
                "input_ids": row.tokens_S[start:end].tolist(),
                "completion_mask": [int(at in counted) for at in range(start, end)],
            }

"""On real text the demo model is as surprised as transformers says it is, and not more than sane.

This checks transformers too: a decoder that both get wrong in one way would not predict English.
"""

from __future__ import annotations

import heapq
import random
from inspect import cleandoc
from math import exp
from pathlib import Path

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from phalanx.models.demo import ensure_demo_model
from phalanx.models.hf import load_decoder
from phalanx.ops.loss import token_losses
from tests.models.test_demo import needs_package, pytest_demo

# Prose of the standard library; the longer row passes the window of 512 tokens.
TEXTS = (heapq.__about__, random.__doc__)
# Measured: 20.6 (a 270M model that its package keeps in 4 bits); a broken one gives thousands.
SANE = (10.0, 40.0)


@pytest.fixture(scope="module")
def folder() -> Path:
    return ensure_demo_model(log=lambda line: None)


@pytest.fixture(scope="module")
def rows(folder) -> list[Tensor]:
    """Token ids of each text, begin-of-sequence first."""
    from tokenizers import Tokenizer

    tokenizer = Tokenizer.from_file(str(folder / "tokenizer.json"))
    return [torch.tensor(tokenizer.encode(cleandoc(text)).ids[:700]) for text in TEXTS]


@torch.no_grad()
def our_losses(folder: Path, rows: list[Tensor]) -> Tensor:
    """Of all texts packed into one row, in float32."""
    decoder = load_decoder(folder, dtype="float32")
    starts = torch.tensor([0, *(len(row) for row in rows[:-1])]).cumsum(0).tolist()
    hidden_SD = decoder(torch.cat(rows), document_starts=starts)
    counted_N = torch.cat([torch.arange(len(row) - 1) + at for row, at in zip(rows, starts)])
    targets_N = torch.cat([row[1:] for row in rows])
    return token_losses(hidden_SD, decoder.head_weight, counted_N, targets_N)


@torch.no_grad()
def their_losses(folder: Path, rows: list[Tensor]) -> Tensor:
    """Text by text, in float32."""
    from transformers import AutoModelForCausalLM

    model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)
    parts = []
    for row in rows:
        hidden_SD = model.model(row[None]).last_hidden_state[0, :-1]
        for rows_nD, targets_n in zip(hidden_SD.split(128), row[1:].split(128)):
            parts.append(F.cross_entropy(model.lm_head(rows_nD), targets_n, reduction="none"))
    return torch.cat(parts)


@pytest_demo
@needs_package
@pytest.mark.timeout(600)
def test_perplexity_of_real_text_is_sane_and_equals_transformers(folder, rows):
    assert max(map(len, rows)) > 640
    ours = our_losses(folder, rows)
    theirs = their_losses(folder, rows)
    assert exp(ours.mean()) == pytest.approx(exp(theirs.mean()), rel=1e-3)
    torch.testing.assert_close(ours, theirs, rtol=0, atol=1e-3)
    assert SANE[0] < exp(ours.mean()) < SANE[1], exp(ours.mean())

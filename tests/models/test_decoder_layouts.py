"""A decoder is the same function of a row in every order of its tokens."""

from __future__ import annotations

import numpy as np
import pytest
import torch
import torch.nn.functional as F

from phalanx.layout.token_layout import LAYOUTS, token_layout
from phalanx.ops.attention import Documents, packed_attention
from tests.models.cases import CONFIGS, random_decoder, random_tokens

BOUNDS = (0, 5, 21, 48)
S = BOUNDS[-1]


def loss_and_gradient(decoder, tokens_S, positions_S, labels_S, attend):
    """Summed over the tokens that have a successor in their document."""
    decoder.zero_grad()
    hidden_SD = decoder(tokens_S, positions_S, attend=attend)
    loss = F.cross_entropy(decoder.logits(hidden_SD), labels_S, ignore_index=-1, reduction="sum")
    loss.backward()
    return loss.detach(), decoder.model.embed_tokens.weight.grad.clone()


def in_order(order_S):
    """What attends on rows that stand in `order_S`."""
    documents, place_S = Documents(BOUNDS), torch.argsort(order_S)

    def attend(q_SHC, k_SKC, v_SKC, *, scale, window):
        rows = (x[place_S] for x in (q_SHC, k_SKC, v_SKC))
        return packed_attention(*rows, documents, scale=scale, window=window)[order_S]

    return attend


@pytest.mark.parametrize("name", LAYOUTS)
def test_loss_and_gradient_do_not_depend_on_the_layout_of_tokens(name):
    """Positions and labels follow their tokens; labels are shifted before they are permuted."""
    decoder = random_decoder(CONFIGS["grouped_queries"]).double()
    tokens_S = random_tokens(decoder.config, S)
    positions_S = Documents(BOUNDS).positions()
    labels_S = tokens_S.roll(-1)
    labels_S[np.array(BOUNDS[1:]) - 1] = -1
    row = (tokens_S, positions_S, labels_S)
    expected = loss_and_gradient(decoder, *row, in_order(torch.arange(S)))
    order_S = torch.from_numpy(token_layout(name, S, 4, BOUNDS).permutation_S)
    permuted = (x[order_S] for x in row)
    found = loss_and_gradient(decoder, *permuted, in_order(order_S))
    for mine, theirs in zip(found, expected):
        torch.testing.assert_close(mine, theirs, rtol=1e-11, atol=1e-12)
    if name != "contiguous":  # and they do depend on the positions
        wrong = (tokens_S[order_S], positions_S, labels_S[order_S])
        other = loss_and_gradient(decoder, *wrong, in_order(order_S))
        assert abs(other[0] - expected[0]) > 1e-3

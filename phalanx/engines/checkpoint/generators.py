"""States of torch's generators, for code of the user's own that draws; Phalanx itself draws by key.

The numbers of a rank belong to its place in the world, so they are given back only to a world of
the same size.
"""

from __future__ import annotations

import base64
from collections.abc import Mapping

import torch
from torch import Tensor


def generator_states(device: torch.device) -> dict[str, str]:
    """Of this process, by device type, in base64."""
    states = {"cpu": torch.get_rng_state()}
    if device.type == "cuda":
        states["cuda"] = torch.cuda.get_rng_state(device)
    return {
        kind: base64.b64encode(each.numpy().tobytes()).decode() for kind, each in states.items()
    }


def set_generator_states(states: Mapping[str, str], device: torch.device) -> None:
    """Go on where `generator_states` was asked."""
    for kind, text in states.items():
        state: Tensor = torch.frombuffer(bytearray(base64.b64decode(text)), dtype=torch.uint8)
        if kind == "cpu":
            torch.set_rng_state(state)
        elif device.type == kind:
            torch.cuda.set_rng_state(state, device)

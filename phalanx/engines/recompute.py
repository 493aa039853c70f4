"""Activations computed again in the backward pass instead of being kept.

What a layer keeps per token, in elements (D model, Q and K channels of all query and key/value
heads, F feed-forward; every matrix trained or adapted, norms before and after both blocks):

| mode | kept | computed again |
|---|---|---|
| none | 6 D + 3 Q + 3 K + 3 F | |
| selective | 4 D + 2 Q + 2 K + 2 F | results of norms and of the gate: no matrix product |
| full | D | the layer's whole forward pass, a third more FLOPs |

Selective recomputation of Korthikanti et al. (arXiv 2205.05198, section 5) repeats the attention
core, whose scores and softmax are its 5as/h bytes. Our attention keeps none of those, and repeating
it would save Q of what is left for two products per query and key. What can be had without any
product is the input of each matrix that a norm or the gate has just made out of something that is
kept anyway; that is what `selective` gives up here.

Everything is repeated by the same code on the same inputs, and dropout is keyed by tokens, so
gradients are the same bit by bit. Parameters are read from their modules again: sharded units have
been gathered for their backward pass by then. Exchanges inside a layer (tensor parallelism) are
repeated by `full`, on all ranks in the same order, and never by `selective`, which therefore keeps
what a split of tokens has gathered, unless its rule gathers it again.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from phalanx.engines.remade import remaking, repeated
from phalanx.errors import PlanError, nearest_names
from phalanx.models.decoder import Decoder
from phalanx.models.decoder_layers import Attention, GatedActivation, RmsNorm

MODES = ("none", "selective", "full")


def apply_recompute(decoder: Decoder, mode: str) -> None:
    """Make the layers of `decoder` compute again what `mode` says, in place.

    Call it before `bind_data`; adapters and tensor parallelism may come before or after. Names and
    parameters stay as they are. Passes without gradient, cached ones included, do not change.

    Raises:
        PlanError: `plan/illegal` for another mode.
    """
    if mode not in MODES:
        legal = nearest_names(mode, MODES)
        raise PlanError("plan/illegal", "plan.recompute", mode, "is no mode", legal=legal)
    for layer in decoder.model.layers.values():
        if mode == "full":
            layer.forward = partial(_again, layer.forward)
        elif mode == "selective":
            _Remaking(layer)


def _again(forward: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
    """The whole forward pass; nothing draws from a random state, so none is put back."""
    if not torch.is_grad_enabled():
        return forward(*args, **kwargs)

    def once(*args: Any, **kwargs: Any) -> Any:
        with repeated():
            return forward(*args, **kwargs)

    return checkpoint(once, *args, use_reentrant=False, preserve_rng_state=False, **kwargs)


class _Remaking:
    """A layer in which autograd keeps, in place of a cheap module's result, how to make it.

    Args:
        layer: its `forward` is replaced; cheap modules below it get a hook.
    """

    def __init__(self, layer: nn.Module) -> None:
        self._forward, self._remade = layer.forward, None
        layer.forward = self._run
        for module in _cheap_modules(layer):
            module.register_forward_hook(self._note, with_kwargs=True)

    def _run(self, *args: Any, **kwargs: Any) -> Any:
        with remaking() as self._remade:
            try:
                return self._forward(*args, **kwargs)
            finally:
                self._remade = None

    def _note(self, module: nn.Module, args: tuple, kwargs: dict, result: Tensor) -> None:
        """A cheap module has made `result`."""
        if self._remade is not None and type(result) is Tensor:
            self._remade.note(result, module.forward, *args, **kwargs)


def _cheap_modules(layer: nn.Module) -> list[nn.Module]:
    """Those whose inputs are kept anyway and whose results take no matrix product.

    Keys and values that later layers use too are not among them: those keep them in any case.
    """
    elsewhere: set[nn.Module | None] = set()
    for module in layer.modules():
        if isinstance(module, Attention) and module.is_shared:
            elsewhere.update((module.k_norm, module.v_norm))
    cheap = (module for module in layer.modules() if isinstance(module, RmsNorm | GatedActivation))
    return [module for module in cheap if module not in elsewhere]

"""A decoder under a tensor spec: which heads a rank has, and what that means for its modules."""

from __future__ import annotations

from collections.abc import Sequence

from torch.distributed import DeviceMesh

from phalanx.engines.bind_tensor import BoundTensor, bind_tensor
from phalanx.errors import PlanError
from phalanx.layout.tensor_split import kv_heads_of, tensor_legality
from phalanx.models.decoder import Decoder
from phalanx.models.spec import DecoderConfig
from phalanx.policy import Spec


def bind_decoder(decoder: Decoder, specs: Sequence[Spec], mesh: DeviceMesh) -> BoundTensor:
    """Apply tensor specs to a decoder, before `bind_data`.

    Where a degree does not divide a layer's key and value heads, their projections stay whole and
    a rank computes the heads that its own query heads attend with.

    Raises:
        PlanError: `plan/illegal` for a degree that cannot cut this decoder, with the nearest that
            can, for split tokens with a whole vocabulary, and as `bind_tensor`.
    """
    config, head_rows = decoder.config, {}
    for spec in specs:
        if spec.axis not in (mesh.mesh_dim_names or ()):
            continue  # bind_tensor says so
        degree = mesh[spec.axis].size()
        tensor_legality(config, degree).require(f"plan.mesh.{spec.axis}")
        head_rows |= _head_rows(config, degree, mesh.get_local_rank(spec.axis))
    bound = bind_tensor(decoder, specs, mesh, head_rows=head_rows)
    has_tokens = decoder.is_first or decoder.is_last  # an inner stage of a pipeline has none
    if bound.splits_tokens and has_tokens and not bound.vocabularies:
        # lookups would be partial by token and logits whole: no one rule for a tied gradient
        rule, legal = "splits tokens but not the vocabulary", ["vocabulary_parallel = true"]
        raise PlanError("plan/illegal", "plan.tensor", bound.axis, rule, legal=legal)
    return bound


def _head_rows(config: DecoderConfig, degree: int, rank: int) -> dict[str, list[int]]:
    """Rows of the key and value projections that a rank computes, where they are not cut."""
    rows = {}
    for at in range(config.num_layers):
        kind = config.attention(at)
        if kind.num_kv_heads % degree:
            heads = kv_heads_of(kind.num_heads, kind.num_kv_heads, degree, rank)
            channels = range(kind.head_dim)
            of_heads = [head * kind.head_dim + channel for head in heads for channel in channels]
            for name in ("k_proj", "v_proj"):
                rows[f"model.layers.{at}.self_attn.{name}"] = of_heads
    return rows

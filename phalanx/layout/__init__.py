"""Which slice of a canonical tensor each rank holds.

A canonical tensor has its Hugging Face name and shape, unfused. A `Layout` puts it on a mesh:

    mesh = Mesh(pp=4, shard=8, tp=2)
    heads = Shard(0, "tp", units=8, rule="even")
    Layout((1024, 4096), mesh, heads, Shard(0, "shard"), Only("pp", 3))

reads: the 8 heads are cut over tp first, then FSDP cuts the rows of each slice, on stage 3. An axis
that no placement names replicates. Everything else is derived: `Fused` puts several canonical
tensors into one local tensor, `Layout.project` lays out what accompanies a tensor (bias, scales,
LoRA factors, factored optimizer state), `phalanx.reshard` turns two layouts into transfers.

Each rank holds one box of a canonical tensor or nothing. Not expressible on purpose: flat buffers
that cut inside a row (FSDP1's flat parameter), and permuted dims (striped tokens: the token
permutation is a value of its own, and the permuted dim is the canonical one).
"""

from phalanx.layout.fused import Fused, PartBox
from phalanx.layout.layout import Box, Layout, Placed
from phalanx.layout.placement import Only, Placement, Shard

__all__ = ["Box", "Fused", "Layout", "Only", "PartBox", "Placed", "Placement", "Shard"]

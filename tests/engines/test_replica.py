"""What a replica contributes; that replicas agree is in the proofs."""

from __future__ import annotations

import torch

from phalanx.action import Compute
from phalanx.engines.replica import Replica
from phalanx.mesh import Mesh


def test_a_parameter_that_a_batch_does_not_use_contributes_zeros():
    """As an expert that got no token; the others' places in the sum stay theirs."""
    names = ("first", "expert", "last")
    params = {name: torch.ones(2, 3, dtype=torch.bfloat16, requires_grad=True) for name in names}

    def compute_grad(step: int) -> None:
        used = names if step == 0 else ("first", "last")
        sum((at + 1) * params[name].sum() for at, name in enumerate(used)).backward()

    replica = Replica(params, torch.optim.SGD(params.values(), lr=0.1), compute_grad)
    context = replica.context(0, Mesh(replica=1))
    found = []
    for step in (0, 1):
        action = Compute(op="grad", item=step, label=f"grad.{step}")
        replica.ops["grad"](context, action)
        found.append(context.get("grad").view(3, 6)[:, 0].tolist())
    assert found == [[1.0, 2.0, 3.0], [1.0, 0.0, 2.0]]
    assert context.get("grad") is replica.grad_N

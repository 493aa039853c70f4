"""What a tensor-parallel layer exchanges and keeps: counted on a real step, against the papers.

Korthikanti et al., arXiv 2205.05198: table 2 and section 4.2.2. S tokens, D model.
"""

from __future__ import annotations

from collections import Counter
from dataclasses import replace

import pytest
import torch.distributed as dist

from phalanx.engines.process import Process
from phalanx.models.spec import small_config
from phalanx.worlds import comm_log
from phalanx.worlds.comm_log import CommLog, CommRow
from phalanx.worlds.logged_group import init_logged
from tests.engines.tensor_cases import (
    MEGATRON,
    SEQUENCE,
    Case,
    bound_loss,
    build,
    cpu_process,
    rows_of,
)
from tests.ranks import current_store, run_ranks

LAYERS, D, S = 3, 16, 12
CONFIG = small_config(
    vocab_size=32, hidden_size=D, intermediate_size=24, num_layers=LAYERS, num_heads=4,
    num_kv_heads=2, head_dim=4, window=4, full_every=2, dtype="float64", init_std=0.2,
)  # fmt: skip
TWICE = MEGATRON | {"sequence_parallel": True}
BESIDE = MEGATRON | {"overlap": True}
CASES = {
    "megatron": Case(config=CONFIG, mesh={"tp": 2}, specs=(MEGATRON,), rows=((S,),)),
    "tokens split": Case(config=CONFIG, mesh={"tp": 2}, specs=(SEQUENCE,), rows=((S,),)),
    "gathered twice": Case(config=CONFIG, mesh={"tp": 2}, specs=(TWICE,), rows=((S,),)),
    "norms again": Case(
        config=CONFIG, mesh={"tp": 2}, specs=(TWICE,), rows=((S,),), recompute="selective"
    ),
}
WHOLE = S * D * 8


def exchanges(rank: int, world_size: int) -> dict[str, Counter]:
    """Of each case the exchanges of whole activations in forward and backward passes."""
    init_logged("gloo", dist.PrefixStore("logged", current_store()), rank, world_size)
    found = {}
    for name, case in CASES.items():
        model = build(case, cpu_process(rank, world_size, case))
        (row,) = rows_of(case, 0)
        log = CommLog(rank)
        model.data.begin_item(0, 1)
        with log.step(0):
            bound_loss(model, case, row, 0).backward()
        model.finish_step()
        found[name] = Counter(
            kind for axis, kind, num_bytes in log.seen() if axis == "tp" and num_bytes == WHOLE
        )
    return found


@pytest.mark.dist
def test_a_layer_exchanges_what_the_papers_count():
    """4 reductions of b s h; or 4 gathers and 4 scatters, and 2 gathers more; the embedding and
    the last norm add one each way."""
    for found in run_ranks(exchanges, 2, backend=None):
        assert found["megatron"] == {"all_reduce": 4 * LAYERS + 1}
        kept, twice, again = (found[name] for name in list(CASES)[1:])
        assert kept == {"all_gather": 4 * LAYERS + 2, "reduce_scatter": 4 * LAYERS + 1}
        assert twice == again == kept + Counter(all_gather=2 * LAYERS)


def course(rank: int, world_size: int) -> list[list[str]]:
    """What happens in the backward pass of the last feed-forward block, plain and overlapped."""
    init_logged("gloo", dist.PrefixStore("logged", current_store()), rank, world_size)
    plain = CASES["megatron"]
    cases = (plain, replace(plain, specs=(BESIDE,)))
    return [events_of(cpu_process(rank, world_size, case), case) for case in cases]


def events_of(process: Process, case: Case) -> list[str]:
    model = build(case, process)
    block, events = model.decoder.model.layers[str(LAYERS - 1)].mlp, []
    for name in ("gate_proj", "up_proj"):
        getattr(block, name).weight.register_hook(lambda _, name=name: events.append(name))
    (row,) = rows_of(case, 0)
    loss = bound_loss(model, case, row, 0)
    issue, wait = comm_log.issued, CommRow.begin_wait
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(comm_log, "issued", lambda row: (events.append("start"), issue(row)))
        patch.setattr(CommRow, "begin_wait", lambda row: (events.append("wait"), wait(row)))
        loss.backward()
    at = min(events.index("gate_proj"), events.index("up_proj"))
    return events[at - 2 : at + 4]


@pytest.mark.dist
def test_with_overlap_weights_have_their_gradients_while_the_sum_is_under_way():
    for plain, beside in run_ranks(course, 2, backend=None):
        assert sorted(plain[2:4]) == sorted(beside[2:4]) == ["gate_proj", "up_proj"]
        assert plain[4:] == ["start", "wait"]
        assert beside[1] == "start" and beside[4] == "wait"

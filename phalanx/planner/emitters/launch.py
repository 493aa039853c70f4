"""Which program a launcher starts on each node: the first that can express the plan."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from phalanx.errors import PlanError
from phalanx.planner.emitters import megatron, phalanx_job, torchtitan, vllm
from phalanx.planner.emitters.base import Site
from phalanx.planner.importers.foreign import ForeignPlan

_PORT = 29_500
_MEGATRON = f"env MEGATRON=Megatron-LM bash {megatron.FILE}"  # the clone of its setup
_PROGRAMS = {
    "phalanx": (phalanx_job, f"-m phalanx train {phalanx_job.FILE} --folder run"),
    "torchtitan": (torchtitan, f"-m torchtitan.train --job.config_file {torchtitan.FILE}"),
    "megatron": (megatron, ""),
}
_SETUP = {
    "phalanx": 'pip install "phalanx-parallel[torch,hf,data]"',
    "torchtitan": f"pip install torchtitan=={torchtitan.VERSION}",
    "megatron": "git clone https://github.com/NVIDIA/Megatron-LM && pip install ./Megatron-LM",
    "vllm": f"pip install vllm=={vllm.VERSION}",
}


@dataclass(frozen=True, kw_only=True)
class Launch:
    """What runs on each node.

    Attributes:
        program: its name; files: what it reads.
        nodes, per_node: how many, and devices of each.
        setup: installs the program.
        command: started once on each node, with NODE_RANK and MASTER_ADDR in its environment.
        refused: why programs that come first cannot run the plan.
    """

    program: str
    files: Mapping[str, str]
    nodes: int
    per_node: int
    setup: str
    command: str
    refused: tuple[str, ...] = ()


def launch(plan: ForeignPlan, site: Site) -> Launch:
    """The first of phalanx, torchtitan and Megatron that can train it; vLLM for a server.

    Raises:
        PlanError: `emit/impossible` when none can: what Phalanx lacks.
    """
    devices = plan.devices or 1
    nodes, per_node = -(-devices // site.devices_per_node), min(devices, site.devices_per_node)
    if plan.role == "serve":
        files = vllm.write(plan, site)
        if nodes > 1:
            rule = f"the server is started on one node, which has {site.devices_per_node}"
            raise PlanError("emit/impossible", "devices", devices, rule)
        command = f"bash {vllm.FILE}"
        return Launch(
            program="vllm",
            files=files,
            nodes=1,
            per_node=per_node,
            setup=_SETUP["vllm"],
            command=command,
        )
    refusals: list[PlanError] = []
    for program, (emitter, arguments) in _PROGRAMS.items():
        try:
            files = emitter.write(plan, site)
        except PlanError as refusal:
            refusals.append(refusal)
            continue
        run = _torchrun(nodes, per_node, arguments) if arguments else _MEGATRON
        return Launch(
            program=program,
            files=files,
            nodes=nodes,
            per_node=per_node,
            setup=_SETUP[program],
            command=run,
            refused=tuple(each.sentence() for each in refusals),
        )
    raise refusals[0]


def _torchrun(nodes: int, per_node: int, arguments: str) -> str:
    return (
        f"torchrun --nnodes {nodes} --nproc-per-node {per_node} "
        f'--node-rank "$NODE_RANK" --master-addr "$MASTER_ADDR" --master-port {_PORT} {arguments}'
    )

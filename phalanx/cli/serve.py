"""`phalanx serve`: an OpenAI endpoint for a model folder and its adapters."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from dataclasses import fields
from pathlib import Path
from typing import Annotated, Any

import typer

from phalanx.cli.output import progress, write
from phalanx.errors import JobError
from phalanx.job import PlanSection, ServeSection

_DEFAULT: dict[str, Any] = {each.name: each.default for each in fields(ServeSection)}


def register(app: typer.Typer) -> None:
    """Add the verb."""
    app.command("serve")(serve)


def serve(
    context: typer.Context,
    folder: Annotated[str, typer.Argument(help="Model folder as Hugging Face writes it.")],
    plan: Annotated[
        str, typer.Option(help="plan.json of `plan --serve -o`: its limits, but for own flags.")
    ] = "",
    host: Annotated[str, typer.Option(help="Address to listen on.")] = _DEFAULT["host"],
    port: Annotated[int, typer.Option(help="Port; 0 takes one that is free.")] = _DEFAULT["port"],
    name: Annotated[str, typer.Option(help="What clients call the model.")] = "",
    max_running: Annotated[int, typer.Option(help="Requests in one batch.")] = _DEFAULT[
        "max_running"
    ],
    max_tokens: Annotated[int, typer.Option(help="Longest prompt plus output.")] = _DEFAULT[
        "max_tokens"
    ],
    max_step_tokens: Annotated[int, typer.Option(help="Tokens computed in one step.")] = _DEFAULT[
        "max_step_tokens"
    ],
    max_queued: Annotated[int, typer.Option(help="Requests that may wait (then 429).")] = _DEFAULT[
        "max_queued"
    ],
    kv_tokens: Annotated[
        int, typer.Option(help="Tokens in the KV cache; 0: what requests can need and memory has.")
    ] = _DEFAULT["kv_tokens"],
    adapter: Annotated[
        list[str] | None,
        typer.Option(help="NAME=FOLDER of a PEFT adapter to serve beside the base; repeatable."),
    ] = None,
    max_adapters: Annotated[int, typer.Option(help="Adapters loaded at the same time.")] = 4,
    max_lora_rank: Annotated[int, typer.Option(help="Largest rank of an adapter.")] = 64,
    admin: Annotated[
        bool, typer.Option("--admin", help="Clients may change weights and adapters, and sleep.")
    ] = False,
    restarts: Annotated[int, typer.Option(help="Starts after an engine process died.")] = 3,
    dtype: Annotated[str, typer.Option(help="Of the weights; '': as the folder says.")] = "",
    kv_dtype: Annotated[str, typer.Option(help="Of the KV cache; '': as the weights.")] = "",
    device: Annotated[str, typer.Option(help="cpu or cuda.")] = "cpu",
    threads: Annotated[int, typer.Option(help="Of the engine; 0: all cores.")] = 0,
    scheduler: Annotated[
        str, typer.Option(help="Policy of the family serve.")
    ] = PlanSection().serve,
) -> None:
    """Serve a model folder until interrupted."""
    from phalanx.engines.serve.settings import ServeSettings, require_packages

    own: dict[str, Any] = dict(
        folder=folder,
        scheduler=scheduler,
        adapters=_adapters(adapter or ()),
        max_adapters=max_adapters,
        max_lora_rank=max_lora_rank,
        admin=admin,
        restarts=restarts,
        name=name,
        host=host,
        port=port,
        max_running=max_running,
        max_tokens=max_tokens,
        max_step_tokens=max_step_tokens,
        max_queued=max_queued,
        kv_tokens=kv_tokens,
        dtype=dtype,
        kv_dtype=kv_dtype,
        device=device,
        threads=threads,
    )
    settings = ServeSettings(**own | _planned(context, plan, folder))
    require_packages()
    from phalanx.engines.serve.front import serve as run

    def announce(url: str, sentence: str, engine: object) -> None:
        progress(sentence)
        write(f"{url}\n")

    progress(f"loading {folder}")
    asyncio.run(run(settings, announce))


def _planned(context: typer.Context, plan: str, folder: str) -> dict[str, Any]:
    """Settings of a lockfile that no flag of this command says otherwise."""
    if not plan:
        return {}
    from phalanx.models.spec import read_config
    from phalanx.plan import Plan
    from phalanx.planner.serve_lockfile import serve_limits

    limits = serve_limits(Plan.load(plan), read_config(folder))
    given = {name for name in limits if _is_given(context, name)}
    return {name: value for name, value in limits.items() if name not in given}


def _is_given(context: typer.Context, name: str) -> bool:
    source = context.get_parameter_source(name)
    return source is not None and source.name != "DEFAULT"


def _adapters(words: Sequence[str]) -> dict[str, str]:
    """ "NAME=FOLDER" of each; a folder alone is named after itself."""
    found: dict[str, str] = {}
    for word in words:
        name, is_named, folder = word.partition("=")
        if not is_named:
            name, folder = Path(word).resolve().name, word
        if not name or not folder or name in found:
            rule = "must be NAME=FOLDER, every name once"
            raise JobError("job/bad-value", "--adapter", repr(word), rule)
        found[name] = folder
    return found

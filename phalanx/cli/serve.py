"""`phalanx serve`: an OpenAI completions endpoint for a model folder."""

from __future__ import annotations

import asyncio
from dataclasses import fields
from typing import Annotated, Any

import typer

from phalanx.cli.output import progress, write
from phalanx.job import PlanSection, ServeSection

_DEFAULT: dict[str, Any] = {each.name: each.default for each in fields(ServeSection)}


def register(app: typer.Typer) -> None:
    """Add the verb."""
    app.command("serve")(serve)


def serve(
    folder: Annotated[str, typer.Argument(help="Model folder as Hugging Face writes it.")],
    host: Annotated[str, typer.Option(help="Address to listen on.")] = _DEFAULT["host"],
    port: Annotated[int, typer.Option(help="Port; 0 takes one that is free.")] = _DEFAULT["port"],
    name: Annotated[str, typer.Option(help="What clients call the model.")] = "",
    max_running: Annotated[int, typer.Option(help="Requests in one batch.")] = _DEFAULT[
        "max_running"
    ],
    max_tokens: Annotated[int, typer.Option(help="Longest prompt plus output.")] = _DEFAULT[
        "max_tokens"
    ],
    max_step_tokens: Annotated[int, typer.Option(help="Tokens computed in one step.")] = 512,
    max_queued: Annotated[int, typer.Option(help="Requests that may wait (then 429).")] = 256,
    kv_tokens: Annotated[
        int, typer.Option(help="Tokens in the KV cache; 0: what requests can need and memory has.")
    ] = 0,
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

    settings = ServeSettings(
        folder=folder,
        scheduler=scheduler,
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
    require_packages()
    from phalanx.engines.serve.front import serve as run

    def announce(url: str, sentence: str) -> None:
        progress(sentence)
        write(f"{url}\n")

    progress(f"loading {folder}")
    asyncio.run(run(settings, announce))

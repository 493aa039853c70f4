"""`phalanx bench`: put load on a server with the OpenAI completions interface, whoever made it."""

from __future__ import annotations

from random import Random
from typing import Annotated

import typer

from phalanx.cli.output import JsonFile, emit, progress, show_report

_FIRST_TOKEN = 1000  # below are special tokens and single bytes, in most vocabularies


def register(app: typer.Typer) -> None:
    """Add the verb."""
    app.command("bench")(bench)


def bench(
    url: Annotated[str, typer.Argument(help="Of the server, e.g. http://127.0.0.1:8000")],
    requests: Annotated[int, typer.Option(min=1, help="How many to send.")] = 64,
    prompt_tokens: Annotated[int, typer.Option(min=1, help="Of each prompt, random.")] = 128,
    output_tokens: Annotated[int, typer.Option(min=1, help="Exactly so many of each.")] = 128,
    concurrency: Annotated[int, typer.Option(min=0, help="At once; 0: no limit.")] = 8,
    rate: Annotated[
        float, typer.Option(min=0.0, help="Poisson arrivals per second; 0: all at once.")
    ] = 0.0,
    vocabulary: Annotated[
        int, typer.Option(min=_FIRST_TOKEN + 1, help="Prompt tokens are drawn below.")
    ] = 30_000,
    model: Annotated[str, typer.Option(help="Name to ask for; '': the server's first.")] = "",
    seed: Annotated[int, typer.Option(help="Of prompts and arrivals.")] = 0,
    json_file: JsonFile = "",
) -> None:
    """Measure TTFT, TPOT, latency and throughput as clients of a server see them."""
    from phalanx.bench_load import load_test

    random = Random(seed)
    prompts = [
        [random.randrange(_FIRST_TOKEN, vocabulary) for _ in range(prompt_tokens)]
        for _ in range(requests)
    ]
    progress(f"{requests} requests to {url}")
    report = load_test(
        url,
        prompts,
        output_tokens=output_tokens,
        concurrency=concurrency,
        rate_per_s=rate,
        seed=seed,
        model=model,
    )
    emit(report.to_dict(), json_file, lambda: show_report(report))

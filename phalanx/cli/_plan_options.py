"""Options of `phalanx plan`."""

from __future__ import annotations

from typing import Annotated

import typer

# what is planned, where
Words = Annotated[
    list[str] | None,
    typer.Argument(
        metavar="[JOB | MODEL] [--section.key VALUE]...",
        help="Job file (TOML), or a model: preset, folder, config.json, Hub name; keys of the job.",
    ),
]
On = Annotated[
    str,
    typer.Option("--on", help="Clusters, e.g. 2xH100,8xH100,v5p-8; instead of plan.on."),
]
Lora = Annotated[
    int | None, typer.Option("--lora", metavar="RANK", help="Train adapters of this rank.")
]
Full = Annotated[bool, typer.Option("--full", help="Train all weights.")]
Output = Annotated[str, typer.Option("-o", "--output", help="Write the lockfile here.")]
Explain = Annotated[bool, typer.Option("--explain", help="Show terms, and where values come from.")]
# rows of one length instead of data
Seq = Annotated[
    str, typer.Option("--seq", metavar="TOKENS", help="Rows of one length, instead of a data file.")
]
GlobalTokens = Annotated[
    str,
    typer.Option("--global-tokens", metavar="TOKENS", help="Of a step, e.g. 16M (M is 1024^2)."),
]
Tokens = Annotated[
    str, typer.Option("--tokens", metavar="TOKENS", help="Of the whole run with --seq, e.g. 15T.")
]
# inverse questions
Deadline = Annotated[
    str, typer.Option("--deadline", metavar="TIME", help="E.g. 12h: how many devices meet it?")
]
Budget = Annotated[
    str, typer.Option("--budget", metavar="USD", help="E.g. 300: how many devices keep to it?")
]
LargestOf = Annotated[
    str, typer.Option("--largest", metavar="WHAT", help="Largest 'context' or 'micro-batch'.")
]
# what is assumed
Precision = Annotated[
    str,
    typer.Option(
        "--precision",
        help="Of matrix products: bf16 (default), fp16, fp8, fp4. With --serve of the weights, "
        "int8, int4 and mxfp4 too (default: as the checkpoint stores them).",
    ),
]
BaseBits = Annotated[
    int,
    typer.Option(
        "--base-bits", metavar="BITS", show_default=False, help="Of frozen weights: 8 or 4 (QLoRA)."
    ),
]
Imbalance = Annotated[
    float, typer.Option("--expert-imbalance", help="Tokens of the busiest expert rank over mean.")
]
Software = Annotated[
    str, typer.Option("--software", help="Whose efficiency is assumed, e.g. megatron, torch:2.6.")
]


# other programs
Emit = Annotated[
    str,
    typer.Option(
        "--emit",
        metavar="TARGET[:FOLDER]",
        help="Write the plan for torchtitan, megatron, vllm, verl, trl, skypilot or slurm.",
    ),
]
From = Annotated[
    str,
    typer.Option(
        "--from",
        metavar="FILE",
        help="Configuration of accelerate, axolotl, TRL, torchtitan or Megatron, or a script with "
        "`vllm serve`: price its plan.",
    ),
]
# serving instead of training
Serve = Annotated[bool, typer.Option("--serve", help="What can be served, instead of trained.")]
PromptTokens = Annotated[
    str, typer.Option("--prompt", metavar="TOKENS", help="Of a prompt (1024 where not given).")
]
AnswerTokens = Annotated[
    str, typer.Option("--answer", metavar="TOKENS", help="Of an answer (256 where not given).")
]
Rate = Annotated[
    str, typer.Option("--rate", metavar="PER_S", help="Requests a second, played one by one.")
]
RequestFile = Annotated[
    str,
    typer.Option(
        "--trace",
        metavar="FILE",
        help="Requests to play: JSON lines or CSV with arrival_s, prompt_tokens, output_tokens; "
        "where prompts begin alike prefix_ids, prefix_block_tokens. Or a trace of Mooncake.",
    ),
]
SharedPrefix = Annotated[
    str,
    typer.Option(
        "--shared-prefix",
        metavar="TOKENS",
        help="Of each prompt, the first tokens that are the same in all: a system prompt.",
    ),
]
NoPrefixCache = Annotated[
    bool,
    typer.Option(
        "--no-prefix-cache",
        help="Engines reuse no prefixes (default: they do, as vLLM, SGLang and TensorRT-LLM).",
    ),
]
FirstToken = Annotated[
    str, typer.Option("--ttft", metavar="TIME", help="To the first token, for 99 of 100 requests.")
]
EachToken = Annotated[
    str, typer.Option("--tpot", metavar="TIME", help="Between tokens, for 99 of 100 requests.")
]
# learning by reinforcement instead of from data
Rl = Annotated[
    str,
    typer.Option(
        "--rl",
        metavar="WORK",
        help="A step of reinforcement learning: prompts=512,samples=16,prompt=200,answer=5700.",
    ),
]
# what was measured
Measured = Annotated[
    str,
    typer.Option(
        "--measured",
        metavar="RUNS",
        help="Correct prices by these run folders or files of `lab remember`; 'all': by all kept.",
    ),
]

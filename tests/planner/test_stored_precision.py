"""Servers are priced with the weights that a checkpoint holds, unless asked otherwise."""

import json

import pytest

from phalanx.cli import main
from phalanx.planner.models import stored_precision


@pytest.mark.parametrize(
    ("name", "precision"),
    [
        ("Qwen/Qwen3-32B-AWQ", "int4"),
        ("Qwen/Qwen3-32B-FP8", "fp8"),
        ("RedHatAI/Llama-3.3-70B-Instruct-quantized.w8a8", "int8"),
        ("nvidia/Qwen3-30B-A3B-NVFP4", "fp4"),
        ("openai/gpt-oss-120b", "mxfp4"),
        ("deepseek-ai/DeepSeek-R1", "fp8"),
        ("unsloth/DeepSeek-V3-bf16", "bf16"),
        ("moonshotai/Kimi-K2-Instruct", "fp8"),
        ("moonshotai/Kimi-K2-Thinking", "int4"),
        ("meta-llama/Llama-3.1-8B", "bf16"),
    ],
)
def test_precision_is_that_of_the_name_or_as_the_maker_published(name, precision):
    assert stored_precision(name) == precision


@pytest.mark.parametrize(("words", "bytes_"), [((), 1.0), (("--precision", "bf16"), 2.0)])
def test_a_server_holds_the_published_weights_unless_asked(capsys, words, bytes_):
    code = main(["plan", "deepseek-r1", "--serve", "--on", "8xh200", *words, "--json", "-"])
    document = json.loads(capsys.readouterr().out)
    fits_in_fp8 = 671e9 * bytes_ < 8 * 141e9  # 671 GB of fp8 weights fit, 1.3 TB do not
    assert document["fits"] == fits_in_fp8
    assert code == (0 if fits_in_fp8 else 1)


@pytest.mark.parametrize(
    ("name", "words", "flags"),
    [
        ("openai/gpt-oss-120b", (), ["--dtype bfloat16"]),
        ("Qwen/Qwen3-32B-AWQ", (), ["--dtype bfloat16"]),
        ("Qwen/Qwen3-32B-FP8", (), ["--dtype bfloat16", "--kv-cache-dtype fp8"]),
        (
            "Qwen/Qwen3-32B",
            ("--precision", "fp8"),
            ["--quantization fp8", "--kv-cache-dtype fp8"],
        ),
    ],
)
def test_an_engine_is_told_of_no_weights_but_those_it_has_to_make(tmp_path, name, words, flags):
    argv = ["plan", name, "--serve", "--on", "8xh200", *words, "--emit", f"vllm:{tmp_path}"]
    assert main(argv) == 0
    script = (tmp_path / "serve.sh").read_text()
    told = [flag for flag in ("--dtype", "--quantization", "--kv-cache-dtype") if flag in script]
    assert told == [flag.split()[0] for flag in flags]
    assert all(flag in script for flag in flags)

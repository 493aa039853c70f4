"""`train.lora_targets` counts in what a cluster is priced for: parameters, memory, time."""

import pytest

from phalanx.cli.app import run
from phalanx.cost.layer_shape import AttentionShape, FeedForwardShape, LayerShape
from phalanx.errors import JobError
from phalanx.job import load_job
from phalanx.planner.models import stored_bits
from phalanx.planner.price import price_job
from phalanx.planner.question import Question

ATTENTION = ("q_proj", "k_proj", "v_proj", "o_proj")


def priced(model, targets, on="1xh100", rank=16):
    flags = {"model.name": model, "train.method": "lora", "train.lora_rank": rank}
    flags |= {"train.global_batch_tokens": 4096}
    if targets:
        flags["train.lora_targets"] = list(targets)
    return price_job(load_job(None, flags), Question(on=on, seq_tokens=1024))


@pytest.mark.parametrize(
    "targets",
    [("q_proj",), ("q_proj", "v_proj"), ATTENTION, ("down_proj",), ("*.mlp.*",), ()],
)
def test_gradients_are_of_the_named_matrices_alone(targets):
    """Four bytes for each trained element, as the decoder's own list of tensors counts them."""
    job = priced("llama-3.1-8b", targets, rank=64)
    assert job.answers[0].best.sized.terms["gradients"] == 4 * job.num_trained


def test_adapters_of_attention_alone_by_hand():
    """Qwen3 30B-A3B: 48 layers of q 2048 x 4096, k and v 2048 x 512, o 4096 x 2048."""
    job = priced("qwen3-30b-a3b", ATTENTION)
    by_hand = 48 * 16 * ((2048 + 4096) * 2 + (2048 + 512) * 2)
    assert job.num_trained == by_hand
    answer = job.answers[0]
    assert answer.fits and answer.best.sized.terms["gradients"] == 4 * by_hand
    assert priced("qwen3-30b-a3b", ()).num_trained > 60 * by_hand  # 128 experts a layer


def test_fewer_adapters_never_need_more_memory_or_time():
    some, more, all_of_them = (
        priced("llama-3.1-8b", targets).answers[0] for targets in (("q_proj",), ATTENTION, ())
    )
    needs = [each.smallest.peak_bytes for each in (some, more, all_of_them)]
    takes = [each.best.total_s for each in (some, more, all_of_them)]
    assert needs == sorted(needs) and needs[0] < needs[2]
    assert takes == sorted(takes) and takes[0] < takes[2]


def test_targets_that_match_nothing_are_refused_for_every_architecture():
    for model in ("qwen3-30b-a3b", "llama-3.1-8b"):
        with pytest.raises(JobError, match=r"'query': matches no matrix"):
            assert priced(model, ("query",)).num_trained


def test_patterns_of_one_layer_stand_for_all_that_are_alike():
    attention = AttentionShape(num_heads=4, num_kv_heads=2, head_dim=8)
    mixed = FeedForwardShape(num_experts=4, num_active=2, expert_width=16, shared_width=16)
    layer = LayerShape(count=3, attention=attention, feed_forward=mixed)

    def names(*patterns):
        return [product.name for product in layer.adapted(32, patterns)]

    assert names("model.layers.2.self_attn.q_proj") == ["q_proj"]
    assert names("*.experts.up_proj") == ["experts.up_proj"]
    assert names("up_proj") == ["shared_experts.up_proj", "experts.up_proj"]
    assert names("*.self_attn.?_proj") == list(ATTENTION)


@pytest.mark.parametrize(
    ("name", "bits"),
    [
        ("Qwen/Qwen3-32B-AWQ", 4),
        ("unsloth/Llama-3.3-70B-Instruct-bnb-4bit", 4),
        ("nvidia/Qwen3-30B-A3B-NVFP4", 4),
        ("neuralmagic/Meta-Llama-3.1-70B-Instruct-FP8", 8),
        ("/awq/models/llama-3.1-8b/", 16),
        ("openai/gpt-oss-120b", 16),
    ],
)
def test_the_name_of_a_checkpoint_says_how_many_bits_its_weights_have(name, bits):
    assert stored_bits(name) == bits


def test_a_packed_checkpoint_is_priced_as_it_is_stored_unless_asked(capsys):
    words = ["plan", "Qwen/Qwen3-32B-AWQ", "--lora", "16", "--seq", "1024", "--on", "1xrtx4090"]
    words += ["--global-tokens", "1k"]
    assert run(words) == 0
    assert "4 bits, as its name says" in " ".join(capsys.readouterr().out.split())
    assert run([*words, "--base-bits", "16"]) == 1
    assert "as its name says" not in capsys.readouterr().out


def test_what_a_file_adapts_of_other_models_too_is_left_out_and_said(tmp_path, capsys):
    file = tmp_path / "sft.yaml"
    file.write_text(
        "base_model: llama-3.1-8b\nadapter: lora\nlora_r: 8\nmicro_batch_size: 1\n"
        "sequence_len: 1024\nlora_target_modules: [q_proj, x_proj, lm_head]\n"
    )
    assert run(["plan", "--from", str(file), "--on", "1xh100"]) == 0
    out = " ".join(capsys.readouterr().out.split())
    assert "llama-3.1-8b has no x_proj, lm_head: priced without" in out
    assert "LoRA of rank 8 trains 2.097 M" in out  # 32 layers of 8 (4,096 + 4,096)


def test_adapters_on_experts_of_a_decoder_are_priced_and_simulated_only(capsys):
    words = ["plan", "google/gemma-4-26b-a4b", "--lora", "8", "--seq", "1024", "--on", "1xh100"]
    words += ["--global-tokens", "1k", "--train.lora_targets", "*.experts.*", "--base-bits", "4"]
    assert run(words) == 0
    assert "this architecture" in " ".join(capsys.readouterr().out.split())

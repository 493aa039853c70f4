"""Shapes of models by name are those that their makers published."""

import json

import pytest

from phalanx.errors import JobError
from phalanx.job import load_job
from phalanx.models.known import known_models, known_shape, shape_at
from phalanx.models.shape_keys import FAMILIES, shape_of_keys
from phalanx.planner.models import priced_model

LIKE_LLAMA = {
    "model_type": "llama",
    "vocab_size": 128,
    "hidden_size": 48,
    "intermediate_size": 80,
    "num_hidden_layers": 3,
    "num_attention_heads": 6,
    "num_key_value_heads": 2,
}


def number(text: str) -> float:
    return float(text[:-1]) * {"M": 1e6, "B": 1e9, "T": 1e12}[text[-1]]


def half_of_last_digit(text: str) -> float:
    decimals = len(text[:-1].partition(".")[2])
    return number("0.5" + text[-1]) / 10**decimals


COUNTED = [model for model in known_models() if model.params]


@pytest.mark.parametrize("model", COUNTED, ids=lambda model: model.names[0])
def test_parameters_are_within_one_percent_of_those_published_or_round_to_them(model):
    left_out = number(model.left_out) if model.left_out else 0.0
    expected = number(model.params)
    rounding = min(half_of_last_digit(model.params), 0.03 * expected)
    found = model.shape.num_params + left_out
    assert abs(found - expected) <= max(0.01 * expected, rounding)


@pytest.mark.parametrize(
    "model", [m for m in known_models() if m.active], ids=lambda model: model.names[0]
)
def test_active_parameters_are_those_published(model):
    """Makers count the embedding, the head, both or neither."""
    shape, expected = model.shape, number(model.active)
    table = shape.vocab * shape.hidden
    slack = max(0.01 * expected, half_of_last_digit(model.active))
    low, high = shape.active_params - table, shape.active_params + table
    assert low - slack <= expected <= high + slack


def test_active_parameters_count_the_head_and_not_the_embedding():
    """As gpt-oss' model card does; the biases of its idle experts are the difference."""
    assert known_shape("gpt-oss-120b").active_params / 1e9 == pytest.approx(5.13, rel=0.01)
    assert known_shape("gpt-oss-20b").active_params / 1e9 == pytest.approx(3.61, rel=0.01)


@pytest.mark.parametrize(
    ("spelled", "plain"),
    [
        ("Meta-Llama-3.1-8B-Instruct-FP8", "llama3.1-8b"),
        ("llama3_1-405b", "meta-llama/Llama-3.1-405B"),
        ("nvidia/DeepSeek-R1-0528-NVFP4", "deepseek-ai/DeepSeek-V3"),
        ("DeepSeek-V3/R1", "deepseek-v3"),
        ("amd/Llama-3.1-405B-Instruct-FP8-KV", "llama-3.1-405b"),
        ("llama2-70b-99.9", "Llama-2-70b"),
        ("gptj-99", "EleutherAI/gpt-j-6b"),
        ("Qwen/Qwen3-30B-A3B-Instruct-2507", "qwen3-30b-a3b"),
        ("mistralai/Mixtral-8x22B-Instruct-v0.1", "mixtral-8x22b"),
        ("moonshotai/Kimi-K2-Thinking", "kimi-k2.5"),
        ("Nemotron_3_Super", "nvidia/NVIDIA-Nemotron-3-Super-120B-A12B"),
        ("Nemotron V3 Ultra 550B", "nemotron-3-ultra"),
        ("CodeLlama-13b-hf", "codellama-13b"),
        ("GPT-NeoX-20B", "EleutherAI/gpt-neox-20b"),
    ],
)
def test_a_name_is_known_by_any_usual_spelling(spelled, plain):
    assert known_shape(spelled) == known_shape(plain) is not None


@pytest.mark.parametrize(
    "name",
    """gpt3-175b bloom-176b PaLM_540B MT-NLG_530B Gopher_280B llama4-scout llama4-maverick grok-1
    MiniMaxAI/MiniMax-M2.5 zhipuai/GLM-5 openai/gpt-oss-120b Qwen/Qwen3.5-397B-A17B
    Qwen3-Next-80B-A3B-Instruct Hy3-preview DeepSeek-V3.2 01-ai/Yi-34B nemotron4-340b Nemotron-H_56B
    mistralai/Mistral-Nemo-Instruct-2407 T5_11B mpt-125m opt-350m gemma4-2b gemma4-31b Gemma3-12B
    DeepSeekV4_Flash Qwen3-Omni-30B-A3B-Thinking Qwen3-Coder-480B-A35B-Instruct-FP8
    """.split(),
)
def test_models_of_published_measurements_are_known(name):
    assert known_shape(name.replace("_", " ")).num_params > 1e8


def test_an_unknown_name_has_no_shape():
    assert known_shape("acme/gargantua-9t") is None
    assert known_shape("GPT") is None
    assert known_shape("") is None


def test_no_two_models_share_a_name():
    names = [name for model in known_models() for name in model.names]
    presets = {name for model in known_models() if not model.params for name in model.names}
    twice = {name for name in names if names.count(name) > 1}
    assert twice <= presets


def test_an_unknown_family_is_an_error_that_names_the_keys_needed():
    with pytest.raises(JobError) as caught:
        shape_of_keys({"model_type": "hyena", "hidden_size": 64})
    assert caught.value.code == "model/unknown"
    for key in ("num_hidden_layers", "num_experts_per_tok", "intermediate_size"):
        assert key in str(caught.value)


@pytest.mark.parametrize("kind", sorted(FAMILIES))
def test_a_family_names_every_key_that_is_absent_at_once(kind):
    with pytest.raises(JobError) as caught:
        shape_of_keys({"model_type": kind})
    assert caught.value.code == "job/missing"
    assert "vocab_size" in str(caught.value)
    assert str(caught.value).count(",") >= 2


@pytest.mark.parametrize(
    ("key", "value"),
    [
        ("hidden_size", "wide"),
        ("num_hidden_layers", 0),
        ("vocab_size", True),
        ("intermediate_size", -8),
        ("num_attention_heads", 7),
        ("num_key_value_heads", 2.5),
        ("hidden_size", float("nan")),
    ],
)
def test_a_size_that_cannot_be_is_an_error_at_its_key(key, value):
    with pytest.raises(JobError) as caught:
        shape_of_keys(LIKE_LLAMA | {key: value})
    assert caught.value.code == "job/bad-value"
    assert key in str(caught.value)


def test_a_multimodal_config_is_read_through_its_text_model():
    inner = {key: value for key, value in LIKE_LLAMA.items() if key != "model_type"}
    outer = {"model_type": "llama", "text_config": inner, "vision_config": {"hidden_size": 9}}
    assert shape_of_keys(outer).num_params == shape_of_keys(LIKE_LLAMA).num_params


def test_a_folder_and_a_file_are_read_by_their_config(tmp_path):
    path = tmp_path / "config.json"
    path.write_text(json.dumps(LIKE_LLAMA | {"rope_scaling": {"type": "yarn"}}))
    expected = shape_of_keys(LIKE_LLAMA).num_params
    for name in (tmp_path, path):
        shape, keys = shape_at(str(name))
        assert shape.num_params == expected and keys["rope_scaling"]
    for text, code in (("{", "job/syntax"), ("[]", "job/syntax")):
        path.write_text(text)
        with pytest.raises(JobError) as caught:
            shape_at(str(path))
        assert caught.value.code == code


def test_a_model_that_cannot_be_run_is_priced_by_its_config(tmp_path):
    sizes = {"num_experts": 8, "num_experts_per_tok": 2, "moe_intermediate_size": 16}
    table = LIKE_LLAMA | sizes | {"model_type": "qwen3_moe"}
    (tmp_path / "config.json").write_text(json.dumps(table))
    model = priced_model(load_job(None, {"model.name": str(tmp_path)}))
    assert model.config is None and model.shape.expert_params == 3 * 8 * 3 * 16 * 48
    (tmp_path / "config.json").write_text(json.dumps({"model_type": "hyena"}))
    with pytest.raises(JobError, match="num_experts_per_tok"):
        priced_model(load_job(None, {"model.name": str(tmp_path)}))

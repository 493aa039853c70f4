"""Names, expressions and parameters by which PEFT's programs say which matrices are adapted."""

import re
from fnmatch import fnmatchcase

import pytest

from phalanx.errors import JobError
from phalanx.planner.emitters.base import peft_expression
from phalanx.planner.importers import job_keys, read_text

AXOLOTL = """\
base_model: org/model
adapter: lora
lora_r: 8
micro_batch_size: 1
sequence_len: 2048
"""


def read(line, text=AXOLOTL, name="axolotl.yaml"):
    return read_text(text + line + "\n", name)


@pytest.mark.parametrize(
    ("expression", "targets"),
    [
        (r"model.layers.[\d]+.self_attn.(q|v)_proj", ("q_proj", "v_proj")),
        (
            r"model.language_model.layers.[\d]+.(_wrapped.)?(mlp|self_attn).(up|down|o)_proj",
            ("o_proj", "*.mlp.up_proj", "*.mlp.down_proj"),
        ),
        (r".*\.experts\..*\.down_proj", ("*.experts.down_proj",)),
        (
            r"model.layers.\d+.mlp.(shared_experts.)?up_proj",
            ("*.mlp.up_proj", "*.shared_experts.up_proj"),
        ),
    ],
)
def test_an_expression_adapts_what_it_matches_whole(expression, targets):
    plan = read(f"lora_target_modules: '{expression}'")
    assert plan.lora_targets == targets
    assert job_keys(plan)["train.lora_targets"] == list(targets)
    assert plan.origin["lora_targets"] == "line 6: lora_target_modules"


def test_an_expression_for_some_layers_is_said_to_be_priced_on_all():
    plan = read(r"lora_target_modules: '.*\.layers\.(3|7)\.self_attn\.q_proj'")
    (note,) = [each for each in plan.notes if each.key == "lora_target_modules"]
    assert plan.lora_targets == ("q_proj",) and "some layers" in note.text


@pytest.mark.parametrize("expression", ["(q_proj", r"encoder.\d+.fc1|vision.[0-9]+.fc2"])
def test_an_expression_that_adapts_nothing_is_refused_with_its_line(expression):
    with pytest.raises(JobError, match=r"axolotl.yaml:6: lora_target_modules"):
        read(f"lora_target_modules: '{expression}'")


def test_stacked_experts_are_parameters_of_their_own():
    lines = "lora_target_modules: [q_proj]\nlora_target_parameters:\n"
    plan = read(lines + "  - mlp.experts.gate_up_proj\n  - experts.down_proj\n  - router.bias")
    experts = tuple(f"*.experts.{name}_proj" for name in ("gate", "up", "down"))
    assert plan.lora_targets == ("q_proj", *experts)
    assert [each.text for each in plan.notes if each.key == "lora_target_parameters"] == [
        "an adapter of router.bias is not priced"
    ]


def test_weights_packed_by_gptq_have_four_bits():
    plan = read("gptq: true")
    assert (plan.base_bits, plan.origin["base_bits"]) == (4, "line 6: gptq")


def test_patterns_are_written_as_the_expression_that_is_read_again():
    targets = ("q_proj", "*.mlp.up_proj", "*.experts.down_proj")
    expression = peft_expression(targets)
    for line in (f"'{expression}'", f"['{expression}']"):
        assert read(f"lora_target_modules: {line}").lora_targets == targets
    assert peft_expression(("q_proj", "v_proj")) == ""


@pytest.mark.parametrize("pattern", ["*.mlp.*", "*.self_attn.[qv]_proj", "*[!k]_proj", "*.?_proj"])
def test_an_expression_matches_what_its_pattern_does(pattern):
    expression = re.compile(peft_expression((pattern,)))
    for name in ("self_attn.q_proj", "self_attn.k_proj", "mlp.up_proj", "mlp.down_proj"):
        module = f"model.layers.3.{name}"
        assert bool(expression.fullmatch(module)) == fnmatchcase(module, pattern)

"""A file is known by what stands in it; what cannot be known is refused in one line."""

import time

import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st

from phalanx.errors import PhalanxError
from phalanx.planner.importers import (
    KINDS,
    ForeignPlan,
    foreign_plans,
    job_keys,
    read_foreign,
    read_text,
    told,
)
from phalanx.planner.importers.reading import known_keys
from tests.planner.importers.samples import SAMPLES


@pytest.mark.parametrize("kind", SAMPLES)
def test_every_program_is_known_by_its_own_words(kind, tmp_path):
    name, text = SAMPLES[kind]
    (tmp_path / name).write_text(text)
    plan = read_foreign(tmp_path / name)
    assert plan.kind == kind and plan.path == str(tmp_path / name)
    assert plan.version == known_keys(kind)["version"]


@pytest.mark.parametrize("kind", SAMPLES)
def test_the_ending_of_a_name_is_not_needed(kind):
    assert read_text(SAMPLES[kind][1], "config").kind == kind


def refused(text, name):
    with pytest.raises(PhalanxError) as caught:
        read_text(text, name)
    assert caught.value.exit_code == 2 and "\n" not in caught.value.sentence()
    return caught.value


@pytest.mark.parametrize(
    "name, text, words",
    [
        ("a.yaml", "base_model: m\nmodel_name_or_path: n\n", "base_model of axolotl and"),
        ("a.yaml", "colour: blue\n", "no program that is known"),
        ("a.yaml", "actor_rollout_ref: {}\nx: 1\nactor_rollout_ref.y: 2\n", "verl"),
        ("a.json", '{"architectures": ["LlamaForCausalLM"]}', "config.json"),
        ("a.toml", "[train]\nlr = 1.0\n", "job of Phalanx"),
        ("a.toml", "[owner]\nname = 'x'\n", "not of torchtitan"),
        ("a.sh", "echo hello\n", "no command of a program"),
        ("a.sh", "vllm serve m\npretrain_gpt.py --num-layers 2\n", "megatron and vllm"),
        ("a.sh", "vllm serve m\nvllm serve n\n", "several servers (lines 1, 2)"),
    ],
)
def test_what_is_of_no_program_or_of_two_is_refused(name, text, words):
    error = refused(text, name)
    assert error.code == "foreign/ambiguous" and words in error.sentence()


@pytest.mark.parametrize(
    "name, text, where",
    [
        ("a.yaml", "base_model: m\nb: [1, 2\n", "a.yaml:3"),
        ("a.yaml", "base_model: &a [*a]\n", "a.yaml:1"),
        ("a.yaml", "- 1\n", "a.yaml:1"),
        ("a.yaml", "? [1]\n: 2\n", "a.yaml:1"),
        ("a.toml", "[training\n", "a.toml"),
        ("a.sh", 'vllm serve m\necho "x\n', "a.sh:2"),
        ("a.sh", "A=( 1 2\nvllm serve m\n", "a.sh:1"),
        ("a.yaml", " \n", "a.yaml"),
    ],
)
def test_what_cannot_be_read_names_the_line(name, text, where):
    error = refused(text, name)
    assert error.code == "foreign/unreadable" and error.where == where


def test_files_that_are_not_there_not_text_or_too_large_are_refused(tmp_path):
    for name, content, code in (
        ("none", None, "job/not-found"),
        ("binary", b"base_model: \xff\n", "foreign/unreadable"),
        ("large", b"#" * (1 << 19), "foreign/unreadable"),
    ):
        path = tmp_path / f"{name}.yaml"
        if content is not None:
            path.write_bytes(content)
        with pytest.raises(PhalanxError) as caught:
            read_foreign(path)
        assert caught.value.code == code


def test_a_command_reads_the_file_that_it_names(tmp_path):
    name, text = SAMPLES["trl"]
    (tmp_path / name).write_text(text)
    (tmp_path / "run.sh").write_text(f"trl sft --config {name} --lora_r 8\n")
    plan = read_foreign(tmp_path / "run.sh")
    assert plan.lora_rank == 8 and plan.model == "Qwen/Qwen3-8B"
    (tmp_path / "run.sh").write_text("trl sft \\\n  --config absent.yaml\n")
    with pytest.raises(PhalanxError) as caught:
        read_foreign(tmp_path / "run.sh")
    assert caught.value.where.endswith("run.sh:2")


def test_two_files_are_given_with_a_comma(tmp_path):
    for kind in ("accelerate", "trl"):
        name, text = SAMPLES[kind]
        (tmp_path / name).write_text(text)
    plan = read_foreign(f"{tmp_path}/fsdp.yaml, {tmp_path}/sft.yaml")
    assert plan.shard == 8 and plan.lora_rank == 32


def test_an_alias_brings_its_keys_and_own_keys_win():
    text = "x: &x\n  base_model: other\n  lora_r: 4\nbase_model: m\nadapter: lora\n<<: *x\n"
    plan = read_text(text, "a.yaml")
    assert (plan.model, plan.lora_rank) == ("m", 4)


def whole_or_refused(text, name):
    """Whatever stands there: a plan that can be told, or one clear line."""
    try:
        plan = read_text(text, name)
        assert isinstance(plan, ForeignPlan) and plan.kind in KINDS and told(plan)
        job_keys(plan, 8)
        if plan.role == "train":
            foreign_plans(plan, plan.devices or 8, row_tokens=512)
    except PhalanxError as error:
        assert "\n" not in error.sentence() and error.exit_code == 2


@pytest.mark.parametrize(
    "piece", ["a", "$", "${", "$(", "(", "'", '"', "\\\n", "{", "- ", "[ ", "a: "]
)
@pytest.mark.parametrize("name", ["a.yaml", "a.sh"])
def test_long_and_odd_files_are_read_or_refused_at_once(name, piece):
    text = "vllm serve " + piece * (40_000 // len(piece))
    start_s = time.process_time()
    whole_or_refused(text, name)
    assert time.process_time() - start_s < 3


names = st.sampled_from(["a.yaml", "a.json", "a.toml", "a.sh", "a"])
scalars = st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=8)
scalars |= st.sampled_from(["auto", "$X", "${X:-3}", "1e400", "0x10", "-1", "1_000", "2026-01-01"])


@settings(max_examples=120)
@given(text=st.text(max_size=120), name=names)
@example(text="a: !!python/object:os.system x\nbase_model: m", name="a.yaml")
@example(text="base_model: !!float x\nlora_r: !!int y", name="a.yaml")
@example(text=f"base_model: m\nlora_r: {'9' * 5000}", name="a.yaml")
@example(text="{" * 3000, name="a.json")
@example(text="x = " + "[" * 3000, name="a.toml")
@example(text="A=$A$A\n" * 40 + "vllm serve $A", name="a.sh")
@example(text="A=(x x)\n" + "A=(${A[@]} ${A[@]})\n" * 40 + "vllm serve $A", name="a.sh")
@example(text="vllm serve", name="a.sh")
@example(text="trl sft --config /dev", name="a.sh")
@example(text="\x00\nvllm serve m --x \x00", name="a.sh")
def test_any_text_is_a_plan_or_an_error_of_ours(text, name):
    whole_or_refused(text, name)


@settings(max_examples=40)
@given(data=st.data())
@pytest.mark.parametrize("kind", SAMPLES)
def test_a_configuration_with_any_values_is_a_plan_or_an_error_of_ours(kind, data):
    name, text = SAMPLES[kind]
    lines = text.splitlines()
    for _ in range(data.draw(st.integers(1, 3))):
        at = data.draw(st.integers(0, len(lines) - 1))
        value = data.draw(scalars)
        head, mark, _ = lines[at].replace(" = ", ": ").rpartition(": ")
        if mark:
            lines[at] = f"{head}{' = ' if name.endswith('.toml') else ': '}{value}"
        else:
            words = lines[at].split(" ")
            words[data.draw(st.integers(0, len(words) - 1))] = str(value)
            lines[at] = " ".join(words)
    whole_or_refused("\n".join(lines), name)


@settings(max_examples=40)
@given(kind=st.sampled_from(["torchtitan", "accelerate", "axolotl", "trl"]), data=st.data())
def test_any_known_keys_with_any_values_are_a_plan_or_an_error_of_ours(kind, data):
    import yaml

    keys = data.draw(st.lists(st.sampled_from(known_keys(kind)["keys"]), max_size=12))
    mark = {"torchtitan": {}, "trl": {"model_name_or_path": "m"}, "axolotl": {"base_model": "m"}}
    table = dict(mark.get(kind, {"distributed_type": "FSDP"}))
    table |= {key: data.draw(scalars | st.lists(scalars, max_size=2)) for key in keys}
    if kind == "torchtitan":
        lines = [f"{key} = {value!r}" for key, value in table.items()]
        return whole_or_refused("\n".join(["training.seq_len = 512", *lines]), "a.toml")
    nested = {}
    for key, value in table.items():
        outer, _, inner = key.partition(".")
        if not inner:
            nested.setdefault(outer, value)
        elif isinstance(nested.setdefault(outer, {}), dict):
            nested[outer][inner] = value
    return whole_or_refused(yaml.safe_dump(nested), "a.yaml")

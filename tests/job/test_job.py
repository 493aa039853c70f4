"""Jobs: what is accepted, what is refused, and where each value came from."""

import pytest

from phalanx.errors import JobError, PhalanxError
from phalanx.job import load_job, parse_flags

JOB = """
[model]
name = "toy"
layers = 6

[train]
item_tokens = [5, 7]

[limits]
memory_bytes = "2 GiB"

[plan]
mesh = {pp = 2, shard = 2}

[plan.data]
name = "fsdp"
prefetch = 1
"""


@pytest.fixture
def job_file(tmp_path):
    path = tmp_path / "small.toml"
    path.write_text(JOB)
    return path


def refused(job_file, *arguments):
    with pytest.raises(JobError) as caught:
        load_job(job_file, parse_flags(list(arguments)))
    return caught.value


def test_file_values_flags_and_defaults_resolve_in_this_order(job_file):
    job = load_job(job_file, parse_flags(["--model.layers", "8", "--plan.mesh.tp=2"]))
    assert (job.name, job.model.layers, job.train.item_tokens) == ("small", 8, (5, 7))
    assert dict(job.plan.mesh) == {"pp": 2, "shard": 2, "tp": 2}
    assert job.limits.memory_bytes == 2 * 2**30
    assert job.data.max_tokens == 0


def test_a_list_of_words_is_a_flag_with_commas(job_file):
    job = load_job(job_file, parse_flags(["--plan.log_to", "wandb, trackio"]))
    assert job.plan.log_to == ("wandb", "trackio")
    assert load_job(job_file, parse_flags(["--plan.log_to="])).plan.log_to == ()
    same = load_job(job_file, parse_flags(["--train.lora_targets", '["q_proj", "*.mlp.*"]']))
    assert same.train.lora_targets == ("q_proj", "*.mlp.*")
    assert "nearest legal values: wandb" in str(refused(job_file, "--plan.log_to", "wanb"))


def test_every_value_tells_its_origin(job_file):
    job = load_job(job_file, parse_flags(["--train.lr", "1e-4"]))
    origins = {dotted: where for dotted, _, where in job.values()}
    assert origins["model.layers"] == "small.toml:4"
    assert origins["limits.memory_bytes"] == "small.toml:10"
    assert origins["plan.data"] == "small.toml:15"
    assert origins["train.lr"] == "flag"
    assert origins["data.source"] == "default"


def test_the_plan_section_never_changes_the_result_key(job_file):
    plain = load_job(job_file)
    replanned = load_job(job_file, parse_flags(["--plan.pipeline", "1f1b", "--plan.devices=4"]))
    retrained = load_job(job_file, parse_flags(["--train.seed", "1"]))
    assert plain.result_key == replanned.result_key != retrained.result_key


@pytest.mark.parametrize(
    ("flag", "value", "code", "legal"),
    [
        ("--train.lrr", "1", "job/unknown-key", "train.lr"),
        ("--tarin.lr", "1", "job/unknown-key", "train"),
        ("--model.name.inner", "1", "job/unknown-key", "model.name"),
        ("--train.lr", "fast", "job/bad-value", None),
        ("--train.steps", "1.5", "job/bad-value", None),
        ("--train.steps", "0", "job/bad-value", 1),
        ("--train.steps", "true", "job/bad-value", None),
        ("--data.too_long", "dropp", "job/bad-value", "drop"),
        ("--data.held_out_frac", "0.9", "job/bad-value", 0.5),
        ("--limits.memory_bytes", "3 Gb", "unit/unknown", "GB"),
        ("--limits.time_s", "3 hours", "unit/unknown", None),
        ("--limits.time_s", "inf", "job/bad-value", None),
        ("--train.lr", "nan", "job/bad-value", None),
        ("--train.item_tokens", "[5, -1]", "job/bad-value", 0),
        ("--train.item_tokens", "[true]", "job/bad-value", None),
        ("--train.steps", "1\nb = 2", "job/bad-value", None),
        ("--model.layers.", "3", "job/unknown-key", "model.layers"),
        ("--plan.pipeline", "3", "job/bad-value", None),
        ("--plan.data", "[3]", "job/bad-value", None),
        ("--plan.mesh.pp", "2.0", "job/bad-value", 2),
        ("--plan.costs.send", "'x'", "job/bad-value", None),
        ("--plan.devices", "99_999_999", "job/bad-value", 10_000_000),
    ],
)
def test_bad_values_are_refused_with_the_nearest_legal_ones(job_file, flag, value, code, legal):
    error = refused(job_file, flag, value)
    assert error.code == code
    assert legal is None or legal in error.legal


@pytest.mark.parametrize("arguments", [["train.lr", "1"], ["--train.lr"], ["--lr", "1"]])
def test_flags_that_are_not_dotted_or_lack_a_value_are_refused(arguments):
    with pytest.raises(JobError) as caught:
        parse_flags(arguments)
    assert caught.value.code == "job/syntax"


def test_flags_are_text_and_files_are_not(tmp_path):
    flags = ["--model.name", "toy", "--train.steps", "5", "--model.dtype", "float32"]
    assert load_job(None, parse_flags(flags)).train.steps == 5
    path = tmp_path / "words.toml"
    path.write_text("[model]\nname = 'toy'\n[plan]\npipeline = 'true'\n")
    assert load_job(path).plan.pipeline == "true"


def test_a_flag_that_reaches_into_no_table_is_refused():
    flags = parse_flags(["--model.name=toy", "--plan.pipeline=3", "--plan.pipeline.x=2"])
    with pytest.raises(JobError, match=r"plan\.pipeline = 3: must be text or a table"):
        load_job(None, flags)


DEEP = ".".join("a" * 3000)


@pytest.mark.parametrize(
    ("text", "code"),
    [
        (b"\xff", "job/syntax"),
        (b"x = " + b"[" * 100_000, "job/syntax"),
        (b"[train]\nsteps = " + b"1" * 5000, "job/syntax"),
        (b"[train]\nsteps = 0x" + b"f" * 5000, "job/bad-value"),
        (b"[train]\nsteps = '5'", "job/bad-value"),
        (b"[train]\nlr = 0x" + b"f" * 300, "job/bad-value"),
        (b"[limits]\ntime_s = 0x" + b"f" * 300, "job/bad-value"),
        (b"[plan]\npipeline = {name = '1f1b', since = 2024-01-01}", "job/bad-value"),
        (f"[plan]\npipeline.{DEEP} = 1".encode(), "job/bad-value"),
        (f"[plan]\ncosts.{DEEP} = 1".encode(), "job/bad-value"),
        (b"[model]\n'layers.' = 3", "job/unknown-key"),
        (b"[plan]\n'pipeline.name' = '1f1b'", "job/unknown-key"),
        (b'["two\\nlines"]', "job/unknown-key"),
    ],
    ids=lambda value: repr(value[:24]),
)
def test_files_that_break_readers_are_refused_in_one_line(tmp_path, text, code):
    path = tmp_path / "bad.toml"
    path.write_bytes(text)
    with pytest.raises(JobError) as caught:
        load_job(path)
    assert caught.value.code == code and len(str(caught.value).splitlines()) == 1


@pytest.mark.parametrize(
    "path", ["a\0b", "x" * 5000, "x" * 5000 + "/a.toml", "/"], ids=lambda p: p[-6:]
)
def test_paths_of_no_file_are_refused(path):
    with pytest.raises(JobError) as caught:
        load_job(path)
    assert caught.value.code == "job/not-found"


@pytest.mark.parametrize(
    ("text", "code"),
    [
        ("[model\nname = 1", "job/syntax"),
        ("[modle]\nname = 'toy'", "job/unknown-key"),
        ("[model]\nnmae = 'toy'", "job/unknown-key"),
        ("model = 3", "job/bad-value"),
        ("[train]\nsteps = 3", "job/missing"),
    ],
)
def test_bad_files_are_refused(tmp_path, text, code):
    path = tmp_path / "bad.toml"
    path.write_text(text)
    with pytest.raises(JobError) as caught:
        load_job(path)
    assert caught.value.code == code


def test_a_missing_file_names_its_neighbours(job_file):
    with pytest.raises(JobError) as caught:
        load_job(job_file.with_name("smal.toml"))
    assert caught.value.code == "job/not-found"
    assert str(job_file) in caught.value.legal


def test_a_schedule_file_lies_beside_its_job_file_and_becomes_its_rows(tmp_path, monkeypatch):
    (tmp_path / "order.csv").write_text("0F0,0B0\n")
    path = tmp_path / "job.toml"
    text = '[model]\nname = "toy"\n[plan]\npipeline = { name = "listed", file = "order.csv" }\n'
    path.write_text(text)
    assert load_job(path).plan.pipeline == {"name": "listed", "rows": ["0F0,0B0"]}
    (tmp_path / "here").mkdir()
    monkeypatch.chdir(tmp_path / "here")
    (tmp_path / "here" / "order.csv").write_text("0F0,0F1,0B0,0B1\n")
    typed = load_job(path, {"plan.pipeline.file": "order.csv"})
    assert typed.plan.pipeline["rows"] == ["0F0,0F1,0B0,0B1"]


def test_a_schedule_file_with_a_doubled_pass_is_refused_with_its_cell(tmp_path):
    (tmp_path / "order.csv").write_text("0F0,0F0,0B0\n")
    flags = {"model.name": "toy", "plan.pipeline.name": "listed"}
    with pytest.raises(PhalanxError) as caught:
        load_job(None, flags | {"plan.pipeline.file": str(tmp_path / "order.csv")})
    assert caught.value.code == "order/doubled" and "column 2" in str(caught.value)


def test_trained_weights_have_a_lower_rate_than_adapters_unless_one_is_named():
    def rate(**train):
        flags = {f"train.{name}": value for name, value in train.items()}
        return load_job(flags={"model.name": "tiny", **flags}).train.lr

    assert rate() == rate(method="lora") == rate(method="pretrain") == 1e-3
    assert rate(method="full") == 2e-5
    assert rate(method="full", lr="1e-3") == 1e-3

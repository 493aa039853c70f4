"""Data sets of the Hub: which files are meant, and what happens without a connection."""

from __future__ import annotations

import json

import pytest

from phalanx.data import hub, sources
from phalanx.data.hub import choose
from phalanx.errors import JobError

COMMIT = "0" * 40


@pytest.mark.parametrize(
    ("names", "path", "meant"),
    [
        (["README.md", "train.jsonl"], "", ["train.jsonl"]),
        (["a.jsonl", "b.jsonl", ".hidden/c.jsonl"], "", ["a.jsonl", "b.jsonl"]),
        (
            ["data/train-1-of-2.parquet", "data/train-0-of-2.parquet", "data/test-0-of-1.parquet"],
            "",
            ["data/train-0-of-2.parquet", "data/train-1-of-2.parquet"],
        ),
        (["rows.json", "validation.json", "dataset_infos.json"], "", ["rows.json"]),
        (["main/train.jsonl", "socratic/train.jsonl"], "main", ["main/train.jsonl"]),
        (["main/train.jsonl", "main/test.jsonl"], "main/test.jsonl", ["main/test.jsonl"]),
        (["a/train.jsonl", "a/test.jsonl"], "a/te*", ["a/test.jsonl"]),
        (
            ["train/0.jsonl", "train/1.jsonl", "test/0.jsonl"],
            "",
            ["train/0.jsonl", "train/1.jsonl"],
        ),
        (["data/train/0.jsonl", "data/val/0.jsonl"], "data", ["data/train/0.jsonl"]),
        (["constraints.jsonl", "latest.jsonl"], "", ["constraints.jsonl", "latest.jsonl"]),
    ],
)
def test_training_files_are_those_that_say_so(names, path, meant):
    assert choose(names, f"owner/name/{path}".rstrip("/"), path) == meant


@pytest.mark.parametrize(
    ("names", "path", "code", "told"),
    [
        (["README.md"], "", "data/empty", "has no data files"),
        (["train.jsonl"], "tests", "data/empty", "nearest legal values: train.jsonl"),
        (["test.jsonl"], "", "job/bad-value", "owner/name/test.jsonl"),
        (["a.jsonl", "a.parquet"], "", "job/bad-value", "owner/name/*.jsonl"),
        (["main/train.jsonl", "socratic/train.jsonl"], "", "job/bad-value", "owner/name/socratic"),
        (["x/a/0.jsonl", "x/b/0.jsonl"], "x", "job/bad-value", "owner/name/x/a"),
    ],
)
def test_what_could_mean_several_things_is_refused(names, path, code, told):
    with pytest.raises(JobError) as caught:
        choose(names, f"owner/name/{path}".rstrip("/"), path)
    assert caught.value.code == code and told in str(caught.value)


@pytest.fixture
def kept(tmp_path, monkeypatch):
    """A cache of huggingface_hub that holds owner/name, and no connection."""
    from huggingface_hub import constants

    base = tmp_path / "hub" / "datasets--owner--name"
    snapshot = base / "snapshots" / COMMIT
    (snapshot / "data").mkdir(parents=True)
    (base / "refs").mkdir()
    (base / "refs" / "main").write_text(COMMIT)
    for part, text in (("train", "to learn"), ("test", "not to learn")):
        (snapshot / "data" / f"{part}.jsonl").write_text(json.dumps({"text": text}) + "\n")
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(constants, "HF_HUB_CACHE", str(tmp_path / "hub"))
    monkeypatch.setattr(constants, "HF_HUB_OFFLINE", True)
    hub.hub_files.cache_clear()
    yield snapshot
    hub.hub_files.cache_clear()


def test_offline_the_kept_copy_is_read(kept):
    (row,) = sources.read_examples("owner/name")
    assert row.text == "to learn" and row.where.endswith("data/train.jsonl:1")
    (held,) = sources.read_examples("owner/name/data/test.jsonl")
    assert held.text == "not to learn"
    before = sources.content_hash("owner/name")
    (kept / "data" / "test.jsonl").write_text("changed")
    assert sources.content_hash("owner/name") == before


def test_offline_without_a_copy_is_one_clear_line(kept):
    with pytest.raises(JobError, match=r"owner/other: .*HF_HUB_OFFLINE") as caught:
        list(sources.read_examples("owner/other"))
    assert caught.value.code == "job/not-found"


def test_without_a_connection_the_way_to_the_copy_is_told(kept, monkeypatch):
    from huggingface_hub import HfApi, constants

    def unreachable(self, name):
        raise ConnectionError("no route to host")

    monkeypatch.setattr(constants, "HF_HUB_OFFLINE", False)
    monkeypatch.setattr(HfApi, "dataset_info", unreachable)
    with pytest.raises(JobError, match=r"no route to host.*HF_HUB_OFFLINE=1") as caught:
        list(sources.read_examples("owner/name"))
    assert caught.value.code == "job/not-found"


def test_only_the_files_that_are_meant_are_fetched(kept, monkeypatch):
    import huggingface_hub
    from huggingface_hub import constants

    class Info:
        siblings = tuple(
            type("File", (), {"rfilename": name}) for name in ("b[1]/x.jsonl", "test.json")
        )

    asked = {}

    def fetched(name, **options):
        asked.update(options, name=name)
        return str(kept)

    monkeypatch.setattr(constants, "HF_HUB_OFFLINE", False)
    monkeypatch.setattr(huggingface_hub.HfApi, "dataset_info", lambda self, name: Info)
    monkeypatch.setattr(huggingface_hub, "snapshot_download", fetched)
    assert hub.hub_files("owner/name") == (kept / "b[1]/x.jsonl",)
    assert asked == {
        "name": "owner/name",
        "repo_type": "dataset",
        "allow_patterns": ["b[[]1]/x.jsonl"],
    }


def test_a_path_that_is_here_is_never_a_name_of_the_hub(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "owner").mkdir()
    with pytest.raises(JobError, match="is no file, folder, Hub name"):
        list(sources.read_examples("owner/name"))

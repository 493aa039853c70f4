"""Folders appear whole or not at all."""

from __future__ import annotations

import os

import pytest

from phalanx.errors import JobError
from phalanx.models.folders import atomic_folder


def test_folder_appears_only_when_the_body_ends(tmp_path):
    target = tmp_path / "deep" / "model"
    with atomic_folder(target) as folder:
        (folder / "a").write_text("1")
        assert not target.exists()
    assert (target / "a").read_text() == "1"
    assert os.listdir(target.parent) == ["model"]


def test_error_leaves_the_old_folder_and_no_scratch(tmp_path):
    target = tmp_path / "model"
    with atomic_folder(target) as folder:
        (folder / "a").write_text("old")
    with pytest.raises(KeyError), atomic_folder(target, overwrite=True) as folder:
        (folder / "a").write_text("new")
        raise KeyError
    assert (target / "a").read_text() == "old"
    assert os.listdir(tmp_path) == ["model"]


def test_overwriting_replaces_all_files(tmp_path):
    target = tmp_path / "model"
    for name in ("a", "b"):
        with atomic_folder(target, overwrite=True) as folder:
            (folder / name).write_text(name)
    assert os.listdir(target) == ["b"] and os.listdir(tmp_path) == ["model"]


def test_existing_folder_is_refused_with_a_free_name(tmp_path):
    (tmp_path / "model").mkdir()
    (tmp_path / "model-2").mkdir()
    with pytest.raises(JobError, match="model-3") as caught, atomic_folder(tmp_path / "model"):
        pass
    assert caught.value.code == "job/bad-value"


def test_files_get_the_permissions_of_ordinary_files(tmp_path):
    mask = os.umask(0o027)
    try:
        with atomic_folder(tmp_path / "model") as folder:
            (folder / "private").touch(mode=0o600)
    finally:
        os.umask(mask)
    assert (tmp_path / "model").stat().st_mode & 0o777 == 0o750
    assert (tmp_path / "model" / "private").stat().st_mode & 0o777 == 0o640

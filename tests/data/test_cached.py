"""The cache: one writer, everybody sees all of a result or nothing, and it decides nothing."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time

import numpy as np
import pytest

from phalanx.data import cached
from phalanx.data.prepare import DataSettings, prepare
from phalanx.data.tokenise import train_tokenizer
from phalanx.errors import JobError

PREPARE = """
import sys
from phalanx.data import prepare as module
collect = module.collect
def counted(*arguments):
    print("wrote", flush=True)
    return collect(*arguments)
module.collect = counted
found = module.prepare(module.DataSettings(source=sys.argv[1], held_out_frac=0.0), sys.argv[2])
print(found.path, len(found.train), int(found.train.tokens_T.sum()))
"""
WAIT = """
import sys, time
from pathlib import Path
from phalanx.data.cached import cached_folder
def fill(folder):
    (folder / "half").write_text("half")
    print("begun", flush=True)
    time.sleep(60)
cached_folder(Path(sys.argv[1]), fill)
"""


@pytest.fixture(autouse=True)
def own_cache(tmp_path, monkeypatch):
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    return train_tokenizer(["some words to learn"] * 3, 300, tmp_path_factory.mktemp("tokenizer"))


def source(tmp_path, *texts):
    path = tmp_path / "rows.jsonl"
    path.write_text("".join(json.dumps({"text": text}) + "\n" for text in texts))
    return str(path)


def started(code, *arguments):
    command = [sys.executable, "-c", code, *arguments]
    return subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)


def test_of_many_processes_one_prepares_and_all_read_the_same(tmp_path, folder):
    path = source(tmp_path, *(f"some words, number {number}" for number in range(300)))
    processes = [started(PREPARE, path, str(folder)) for _ in range(4)]
    outputs = [process.communicate(timeout=60) for process in processes]
    assert [process.returncode for process in processes] == [0] * 4, outputs
    lines = [out.splitlines() for out, _ in outputs]
    assert sum(line == "wrote" for out in lines for line in out) == 1
    assert len({out[-1] for out in lines}) == 1
    kept = list((tmp_path / "cache" / "phalanx" / "data").iterdir())
    assert len(kept) == 1 and not kept[0].name.startswith(".")


def test_a_killed_writer_blocks_nobody_and_leaves_nothing(tmp_path):
    target = tmp_path / "kind" / "result"
    process = started(WAIT, str(target))
    assert process.stdout.readline() == "begun\n"
    process.send_signal(signal.SIGKILL)
    process.wait(timeout=30)
    process.stdout.close()
    process.stderr.close()
    assert not target.exists() and len(list(target.parent.iterdir())) >= 1
    cached.cached_folder(target, lambda new: (new / "whole").write_text("whole"))
    assert [each.name for each in target.parent.iterdir()] == ["result"]
    assert [each.name for each in target.iterdir()] == ["whole"]


def test_what_a_killed_writer_left_is_gone_after_the_next_write_of_anything(tmp_path):
    dead, alive = tmp_path / "kind" / "dead", tmp_path / "kind" / "alive"
    processes = [started(WAIT, str(target)) for target in (dead, alive)]
    assert [process.stdout.readline() for process in processes] == ["begun\n"] * 2
    processes[0].kill()
    processes[0].communicate(timeout=30)
    cached.cached_file(tmp_path / "kind" / "other", lambda new: new.write_text("whole"))
    kept = {each.name.split(".")[1] for each in dead.parent.iterdir() if each.name[0] == "."}
    assert kept == {"alive"}  # with its lock and its half-written folder
    assert len(list(dead.parent.iterdir())) == 3
    processes[1].kill()
    processes[1].communicate(timeout=30)


def test_a_waiting_process_goes_on_when_the_writer_dies(tmp_path):
    target = tmp_path / "kind" / "result"
    first = started(WAIT, str(target))
    assert first.stdout.readline() == "begun\n"
    second = started(WAIT, str(target))
    time.sleep(0.3)
    first.kill()
    assert second.stdout.readline() == "begun\n"
    second.kill()
    for process in (first, second):
        process.communicate(timeout=30)


def test_failed_writer_leaves_nothing_behind(tmp_path):
    def write(path):
        path.write_text("half")
        raise OSError(28, "No space left on device")

    for way in (cached.cached_file, cached.cached_folder):
        target = tmp_path / way.__name__ / "result"

        def fill(new, way=way):
            write(new if way is cached.cached_file else new / "part")

        with pytest.raises(JobError, match="cannot be written: no space left") as caught:
            way(target, fill)
        assert caught.value.code == "data/cache" and "XDG_CACHE_HOME" in str(caught.value)
        assert list(target.parent.iterdir()) == []


def test_a_result_is_read_again_without_writing(tmp_path):
    target = tmp_path / "kind" / "result"
    assert cached.cached_file(target, lambda new: new.write_text("once")).read_text() == "once"
    cached.cached_file(target, lambda new: pytest.fail("written twice"))
    os.chmod(target.parent, 0o500)
    try:
        assert cached.cached_file(target, lambda new: None) == target
    finally:
        os.chmod(target.parent, 0o700)


def test_cache_is_used_and_depends_on_content(tmp_path, folder):
    def prepared(text, **more):
        settings = DataSettings(source=source(tmp_path, text), held_out_frac=0.0, **more)
        return prepare(settings, folder)

    first = prepared("one")
    stamp = (first.path / "prepared.json").stat().st_mtime_ns
    again = prepared("one")
    assert again.path == first.path
    assert (again.path / "prepared.json").stat().st_mtime_ns == stamp
    assert np.array_equal(again.train.tokens_T, first.train.tokens_T)
    assert prepared("two").path != first.path
    assert prepared("one", max_tokens=99).path != first.path


def test_what_was_measured_too_long_ago_is_written_anew(tmp_path):
    target = tmp_path / "kind" / "rates.json"
    texts = iter(("first", "second"))
    write = lambda new: new.write_text(next(texts))  # noqa: E731
    for age_s, expected in ((0.0, "first"), (3599.0, "first"), (3601.0, "second")):
        if target.exists():
            before_s = time.time() - age_s
            os.utime(target, (before_s, before_s))
        assert cached.cached_file(target, write, 3600.0).read_text() == expected
    os.utime(target, (0.0, 0.0))
    assert cached.cached_file(target, write).read_text() == "second"

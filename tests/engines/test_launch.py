"""Several local processes: what they are told, what is heard, and what happens when one fails."""

from __future__ import annotations

import os
import signal
import textwrap
import threading
import time

import pytest

from phalanx.engines.launch import launch_local
from phalanx.errors import WorldError

pytestmark = pytest.mark.dist


@pytest.fixture
def module(tmp_path, monkeypatch):
    """Write a module and make child processes find it."""

    def write(text: str) -> str:
        (tmp_path / "child.py").write_text("import os, sys, time\n" + textwrap.dedent(text))
        monkeypatch.setenv("PYTHONPATH", str(tmp_path))
        return "child"

    return write


def test_ranks_get_torchruns_variables_and_rank_0_is_heard(module):
    name = module(
        """
        names = "RANK LOCAL_RANK WORLD_SIZE LOCAL_WORLD_SIZE MASTER_ADDR".split()
        has_port = int(os.environ["MASTER_PORT"]) > 0
        print(*(os.environ[name] for name in names), has_port, sys.argv[1])
        """
    )
    lines = []
    launch_local(name, ["argument"], 3, on_line=lines.append)
    assert lines == ["0 0 3 3 127.0.0.1 True argument"]


def test_first_failing_rank_is_named_and_the_others_end(module):
    name = module(
        """
        if os.environ["RANK"] == "1":
            print("data/row: rows.jsonl:3 = [1]: is a row of no known form", file=sys.stderr)
            sys.exit(2)
        time.sleep(600)
        """
    )
    start_s = time.monotonic()
    with pytest.raises(WorldError) as caught:
        launch_local(name, [], 2)
    assert time.monotonic() - start_s < 100
    assert caught.value.code == "world/failed"
    assert str(caught.value) == "rank 1: data/row: rows.jsonl:3 = [1]: is a row of no known form"


def test_a_crash_shows_the_end_of_its_traceback(module):
    name = module("raise RuntimeError('no such thing')")
    with pytest.raises(WorldError, match="rank 0: RuntimeError: no such thing") as caught:
        launch_local(name, [], 1)
    assert "Traceback" in str(caught.value)


def test_a_killed_rank_is_dead(module):
    name = module("os.kill(os.getpid(), 9)")
    with pytest.raises(WorldError, match="rank 0: was ended by signal 9") as caught:
        launch_local(name, [], 1)
    assert caught.value.code == "world/dead"


def test_ranks_that_do_not_end_are_named(module):
    name = module("time.sleep(600) if os.environ['RANK'] == '1' else None")
    with pytest.raises(WorldError, match=r"ranks \[1\]: did not end within 4 s") as caught:
        launch_local(name, [], 2, timeout_s=4.0)
    assert caught.value.code == "world/timeout"


def test_ranks_may_join_again_after_they_left(module, monkeypatch):
    name = module(
        """
        import torch
        from phalanx.engines.process import start_process
        from phalanx.mesh import Mesh
        for mesh in (Mesh(shard=2), Mesh(replicate=2), Mesh(shard=2)):
            with start_process("cpu", mesh, timeout_s=60.0) as process:
                total = process.sum(process.rank + 1.0)
        print(total)
        """
    )
    lines: list[str] = []
    launch_local(name, [], 2, on_line=lines.append, timeout_s=300.0)
    assert lines == ["3.0"]


def test_a_process_that_is_told_to_stop_tells_its_ranks_and_waits_for_them(module, tmp_path):
    name = module(
        f"""
        import signal
        from pathlib import Path
        told = []
        signal.signal(signal.SIGTERM, lambda *_: told.append(1))
        Path({str(tmp_path)!r}, "up" + os.environ["RANK"]).touch()
        while not told:
            time.sleep(0.01)
        time.sleep(0.5)  # saves
        Path({str(tmp_path)!r}, "saved" + os.environ["RANK"]).touch()
        """
    )

    def interrupt() -> None:
        while len(list(tmp_path.glob("up*"))) < 2:
            time.sleep(0.01)
        os.kill(os.getpid(), signal.SIGINT)

    threading.Thread(target=interrupt).start()
    before = signal.getsignal(signal.SIGINT)
    with pytest.raises(KeyboardInterrupt):
        launch_local(name, [], 2, timeout_s=300.0, stop_s=100.0)
    assert len(list(tmp_path.glob("saved*"))) == 2
    assert signal.getsignal(signal.SIGINT) is before


def test_what_a_rank_left_unsaid_is_told_by_its_exit_code(module):
    with pytest.raises(WorldError, match="rank 0: exit code 3"):
        launch_local(module("sys.exit(3)"), [], 1)


@pytest.mark.filterwarnings("ignore::pytest.PytestUnhandledThreadExceptionWarning")
def test_a_listener_that_fails_does_not_keep_a_rank_from_writing(module, tmp_path):
    name = module(
        f"""
        for _ in range(10_000):
            print("x" * 100)
        open({str(tmp_path / "done")!r}, "w").close()
        """
    )
    launch_local(name, [], 1, on_line=fails, timeout_s=100.0)
    assert (tmp_path / "done").exists()


def fails(line: str) -> None:
    raise BrokenPipeError("no terminal")

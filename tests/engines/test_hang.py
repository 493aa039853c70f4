"""A rank that dies or hangs is named in time, with its last collective; a slow one is let be."""

from __future__ import annotations

import os
import re
import signal
import subprocess
import sys
import time
from dataclasses import replace
from pathlib import Path

import pytest

from phalanx.engines.hang import Monitor, Vital, vital_of, waits_for_disk
from phalanx.engines.launch import launch_local
from phalanx.engines.signs import ENDED, FOLDER, Sign, read_sign, stack_path, write_sign
from phalanx.engines.watch import Watch
from phalanx.errors import WorldError

MODULE, HANG_S = "tests.engines.watched_rank", 2.0
# limits that a machine many times as slow, or as busy, must keep too: only a hang goes beyond
START_S, END_S, LAUNCH_S = 200.0, 60.0, 300.0
LAST = re.compile("last collective: all_reduce default_pg#2, 4000 bytes, (done|not seen to end)")
ROOT = Path(__file__).resolve().parent.parent.parent


pytestmark = pytest.mark.timeout(400)


@pytest.fixture(autouse=True)
def one_thread(monkeypatch):
    monkeypatch.setenv("OMP_NUM_THREADS", "1")
    monkeypatch.chdir(ROOT)


def launched(folder: Path, deed: str) -> list[str]:
    lines: list[str] = []
    monitor = Monitor(folder, 2, HANG_S)
    arguments = [str(folder), deed, str(HANG_S)]
    launch_local(MODULE, arguments, 2, on_line=lines.append, timeout_s=LAUNCH_S, monitor=monitor)
    return lines


def pids(folder: Path) -> list[int]:
    return [sign.pid for rank in range(2) if (sign := read_sign(folder, rank))]


def are_gone(numbers: list[int], within_s: float = END_S) -> bool:
    end_s = time.monotonic() + within_s
    while any(is_running(number) for number in numbers):
        if time.monotonic() > end_s:
            return False
        time.sleep(0.05)
    return True


def is_running(pid: int) -> bool:
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] not in "ZX"
    except OSError:
        return False


@pytest.mark.dist
@pytest.mark.parametrize(
    ("deed", "code", "told"),
    [
        ("die", "world/dead", r"was ended by signal 9 \(SIGKILL\); in step"),
        ("stop", "world/timeout", r"has been stopped by a signal .*\d s; in step"),
        ("sleep", "world/timeout", r"has done nothing for \d+ s while others wait for it"),
        ("raise", "world/failed", r"RuntimeError: no such thing; in step 4 \(step\)"),
        ("linger", "world/failed", r"RuntimeError: no such thing; in step 4 \(step\)"),
        ("refuse", "world/failed", "data/row: rows.jsonl:3: is a row of no known form"),
    ],
)
def test_the_cause_is_named_with_its_last_collective_and_the_stacks_of_all(
    tmp_path, deed, code, told
):
    with pytest.raises(WorldError) as caught:
        launched(tmp_path, deed)
    assert time.monotonic() - float((tmp_path / "deed").read_text()) < HANG_S + END_S
    line = str(caught.value).splitlines()[0]
    assert caught.value.code == code and line.startswith("rank 1") and re.search(told, line)
    if deed != "refuse":
        assert f"on {os.uname().nodename}" in line
        assert LAST.search(line)
    assert len(pids(tmp_path)) == 2 and are_gone(pids(tmp_path))
    if code == "world/timeout":
        assert f"stacks of all ranks: {tmp_path / FOLDER}" in str(caught.value)
        waits, culprit = (stack_path(tmp_path, rank).read_text() for rank in range(2))
        assert "all_reduce" in waits and "watched_rank.py" in waits
        assert "watched_rank.py" in culprit and "in step" in culprit


@pytest.mark.dist
@pytest.mark.parametrize("deed", ["compute", "prepare"])
def test_slow_is_no_hang(tmp_path, deed):
    assert launched(tmp_path, deed) == [str(number) for number in range(6)]


@pytest.mark.dist
@pytest.mark.parametrize("number", [signal.SIGKILL, signal.SIGTERM])
def test_ranks_end_with_their_launcher(tmp_path, number):
    code = (
        "from phalanx.engines.launch import launch_local\n"
        f"launch_local({MODULE!r}, [{str(tmp_path)!r}, 'sleep', '100'], 2)"
    )
    launcher = subprocess.Popen([sys.executable, "-c", code], stderr=subprocess.DEVNULL)
    try:
        end_s = time.monotonic() + START_S
        while not all(s and s.step == 3 for s in (read_sign(tmp_path, r) for r in range(2))):
            assert time.monotonic() < end_s
            time.sleep(0.1)
        launcher.send_signal(number)
        assert launcher.wait(timeout=END_S) != 0
    finally:
        launcher.kill()
        launcher.wait()
    assert are_gone(pids(tmp_path))


@pytest.mark.dist
@pytest.mark.parametrize(
    ("deed", "told"),
    [
        ("die", "error[world/dead]: rank 1 on {host}: has died; in step"),
        ("stop", "error[world/timeout]: rank 1 on {host}: has been stopped by a signal"),
        ("sleep", "error[world/timeout]: rank 1 on {host}: has done nothing for"),
        ("raise", "rank 1 on {host}: failed first: RuntimeError: no such thing"),
    ],
)
def test_under_torchrun_the_first_rank_names_the_cause(tmp_path, deed, told):
    command = [sys.executable, "-m", "torch.distributed.run", "--nproc-per-node", "2", "-m", MODULE]
    done = subprocess.run(
        [*command, str(tmp_path), deed, str(HANG_S)],
        capture_output=True,
        text=True,
        timeout=LAUNCH_S,
    )
    assert done.returncode != 0
    told = told.format(host=os.uname().nodename)
    line, *again = [line for line in done.stderr.splitlines() if told in line]
    assert LAST.search(line)
    assert not again or deed == "sleep"  # where torchrun is slow, the sleeper finds itself, too
    assert are_gone(pids(tmp_path))


class Job:
    """Ranks whose signs and processor time a test writes."""

    def __init__(self, folder: Path, num_ranks: int, host: str = "") -> None:
        (folder / FOLDER).mkdir(parents=True)
        self.folder, self.now_s, self.host = folder, 100.0, host or os.uname().nodename
        self.signs = [self._sign(rank) for rank in range(num_ranks)]
        self.cpu_s = [0.0] * num_ranks
        self.state = ["S"] * num_ranks
        self.monitor = Monitor(
            folder,
            num_ranks,
            10.0,
            clock=self._clock,
            vital=self._vital,
            on_disk=lambda pid: self.state[pid] == "D",
        )

    def _sign(self, rank: int) -> Sign:
        words = {
            "step": 7,
            "part": "step",
            "part_s": 0.0,
            "longest_s": 0.5,
            "num_parts": 8,
            "cpu_s": 0.0,
        }
        calls = {"num_collectives": 40, "last_collective": "all_gather shard#39"}
        return Sign(rank=rank, host=self.host, pid=rank, beat=0, **words, **calls)

    def _clock(self) -> float:
        return self.now_s

    def _vital(self, pid: int) -> Vital:
        return Vital(self.state[pid], self.cpu_s[pid])

    def run(self, seconds, silent=(), busy=(), ahead=()):
        """What the monitor finds in so many seconds."""
        for rank in ahead:
            self._change(rank, num_collectives=self.signs[rank].num_collectives + 1)
        for _ in range(seconds):
            self.now_s += 1.0
            for rank, sign in enumerate(self.signs):
                self.cpu_s[rank] += 0.9 if rank in busy else 0.001
                if rank not in silent:
                    beat, part_s = sign.beat + 1, sign.part_s + 1.0
                    self._change(rank, beat=beat, part_s=part_s, cpu_s=self.cpu_s[rank])
                    write_sign(self.folder, self.signs[rank])
            if found := self.monitor.poll():
                return found
        return None

    def _change(self, rank, **values):
        self.signs[rank] = replace(self.signs[rank], **values)


def test_the_rank_that_is_behind_and_idle_is_the_one_that_hangs(tmp_path):
    found = Job(tmp_path, 4).run(30, ahead=(0, 1, 3), busy=(0, 1, 3))  # accelerators: waits spin
    assert found.where.startswith("rank 2 on") and "while others wait for it" in found.cause


def test_a_rank_that_computes_has_much_longer(tmp_path):
    job = Job(tmp_path, 2)
    assert job.run(95, ahead=(0,), busy=(1,)) is None
    assert job.run(10, busy=(1,)).where.startswith("rank 1 on")


def test_a_first_step_or_an_evaluation_may_take_as_long_as_it_computes(tmp_path):
    job = Job(tmp_path, 2)
    job._change(1, longest_s=0.0)
    assert job.run(400, ahead=(0,), busy=(1,)) is None
    job._change(1, part="evaluate", longest_s=1.0)
    assert job.run(400, busy=(1,)) is None


def test_a_rank_that_waits_for_its_disk_is_no_hang(tmp_path):
    job = Job(tmp_path, 2)
    job.state[1] = "D"
    assert job.run(60, ahead=(0,)) is None


def test_a_stopped_rank_is_called_so_although_its_last_sign_came_late(tmp_path):
    job = Job(tmp_path, 3)
    job.state[2] = "T"
    found = job.run(30, ahead=(0, 1))
    assert found.where.startswith("rank 2 on") and "stopped by a signal" in found.cause


def test_the_kernel_says_how_long_a_process_computed_and_when_it_has_ended():
    child = subprocess.Popen([sys.executable, "-c", "while True: pass"])
    try:
        end_s = time.monotonic() + END_S
        while (seen := vital_of(child.pid)) is None or seen.cpu_s < 0.1:
            assert time.monotonic() < end_s
            time.sleep(0.05)
        child.send_signal(signal.SIGSTOP)
        while vital_of(child.pid).state != "T":
            assert time.monotonic() < end_s
        assert not waits_for_disk(child.pid)
    finally:
        child.kill()
        child.wait()
    assert vital_of(child.pid) is None and not waits_for_disk(child.pid)


def test_nothing_hangs_before_the_first_collective_and_after_an_end(tmp_path):
    job = Job(tmp_path, 2)
    for rank in range(2):
        job._change(rank, num_collectives=0)
    assert job.run(60) is None
    job._change(1, state=ENDED)
    assert job.run(60, ahead=(0,)) is None


def test_ranks_that_all_wait_in_one_place_hang_together(tmp_path):
    assert "all other ranks have waited" in Job(tmp_path, 3).run(30).cause


def test_a_rank_elsewhere_is_known_by_its_signs_alone(tmp_path):
    job = Job(tmp_path, 2, host="elsewhere")
    assert job.run(60, ahead=(0,), busy=(1,)) is None
    assert "no sign of life for 10 s" in job.run(30, busy=(0, 1), silent=(1,)).cause


def test_files_of_an_earlier_run_are_no_silent_ranks(tmp_path):
    job = Job(tmp_path, 2)
    for sign in job.signs:
        write_sign(tmp_path, sign)
    assert job.run(60, silent=(0, 1)) is None


def test_a_monitor_that_was_stopped_itself_starts_anew(tmp_path):
    job = Job(tmp_path, 2)
    job.run(5, busy=(0, 1))
    job.now_s += 3600.0
    assert job.run(5, busy=(0, 1), ahead=(0, 1)) is None


def test_a_sign_costs_less_than_a_thousandth_of_its_interval(tmp_path):
    with Watch(tmp_path, 0, 1, hang_s=1.0) as watch:
        start_s = time.process_time()
        for _ in range(200):
            watch._write()
        assert (time.process_time() - start_s) / 200 < 1e-3

"""Which library is built, and which level is chosen, on machines that lack something."""

from __future__ import annotations

import ctypes
import subprocess
import sys

import pytest
import torch
import torch.nn.functional as F

from phalanx.errors import JobError
from phalanx.ops import native
from phalanx.ops.native import loader
from phalanx.ops.packed_linear import packed_linear
from tests.ops.levels import LEVELS, drawn

needs_compiler = pytest.mark.skipif(not LEVELS, reason="no C++ compiler here")
ORDER = ["amx_bf16", "avx512_bf16", "avx2", "plain"]


@needs_compiler
def test_levels_come_best_first_and_plain_is_always_there():
    assert [name for name in ORDER if name in LEVELS] == LEVELS and LEVELS[-1] == "plain"


@needs_compiler
def test_a_level_that_is_not_there_is_refused_by_name():
    with pytest.raises(JobError, match=r"level = avx1024: is no level .* plain"):
        with native.level("avx1024"):
            pass


def test_without_a_compiler_everything_is_plain_and_says_so(monkeypatch):
    monkeypatch.setattr(loader, "_COMPILERS", ("phalanx-has-no-such-compiler",))
    loader.library.cache_clear()
    try:
        x_SD, weight_FD = drawn(3, 8), drawn(5, 8)
        with pytest.warns(UserWarning, match=r"plain torch operators: there is no C\+\+ compiler"):
            assert not native.serves(x_SD)
        assert native.levels() == []
        assert torch.equal(packed_linear(x_SD, weight_FD), F.linear(x_SD, weight_FD))
    finally:
        loader.library.cache_clear()


@needs_compiler
def test_a_level_that_the_compiler_does_not_know_is_left_out(monkeypatch, tmp_path):
    plain_level = next(each for each in loader._sources() if each.file == "level_vectors.cpp")
    sources = [loader._Source("serving.cpp"), plain_level]
    sources.append(loader._Source("level_amx.cpp", ("-mno-such-feature",), is_optional=True))
    monkeypatch.setattr(loader, "_sources", lambda: sources)
    compiler = next(name for name in loader._COMPILERS if loader.which(name))
    with pytest.warns(UserWarning, match="does not know all of -mno-such-feature: left out"):
        loader._build(compiler, tmp_path / "few.so")
    assert ctypes.CDLL(str(tmp_path / "few.so")).phalanx_num_levels() == 1


# The kernel refuses tiles to a process whose alternate signal stack could not hold them.
_REFUSED = """
import ctypes
class Stack(ctypes.Structure):
    _fields_ = [("at", ctypes.c_void_p), ("flags", ctypes.c_int), ("size", ctypes.c_size_t)]
size = 4096
room = ctypes.create_string_buffer(size)
stack = Stack(ctypes.cast(room, ctypes.c_void_p), 0, size)
assert ctypes.CDLL(None).sigaltstack(ctypes.byref(stack), None) == 0
from phalanx.ops import native
print(*native.levels())
"""


@pytest.mark.skipif("amx_bf16" not in LEVELS, reason="a processor without tiles")
def test_tiles_that_the_system_refuses_are_not_used():
    command = [sys.executable, "-c", _REFUSED]
    done = subprocess.run(command, capture_output=True, text=True, timeout=60)
    assert done.stdout.split() == [name for name in LEVELS if name != "amx_bf16"], done.stderr

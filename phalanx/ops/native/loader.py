"""The compiled library: built once per machine, cached, loaded; and who may use it."""

from __future__ import annotations

import ctypes
import platform
import subprocess
import warnings
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from functools import cache
from pathlib import Path
from shutil import which
from typing import NamedTuple

import torch
from torch import Tensor, nn

from phalanx.data.cached import cache_folder, cached_file, content_key

_FOLDER = Path(__file__).parent
_COMPILERS = ("g++", "clang++", "c++")
# no -ffast-math: a NaN must stay one, the guard of training looks for it
_FLAGS = ("-O3", "-fno-math-errno", "-fno-trapping-math", "-fopenmp", "-std=c++17", "-fPIC")
_AVX2 = ("-mavx2", "-mfma")
_AVX512 = (*_AVX2, "-mavx512f", "-mavx512bw", "-mavx512dq", "-mavx512vl", "-mavx512bf16")
_PLAIN = (Tensor, nn.Parameter)
_is_enabled = True


class _Source(NamedTuple):
    """A file and the flags for it; an optional one may need a newer compiler."""

    file: str
    flags: tuple[str, ...] = ()
    is_optional: bool = False


def _sources() -> list[_Source]:
    native = [_Source(f"{name}.cpp", ("-march=native",)) for name in _FOR_THIS_MACHINE]
    # -Wno-psabi: vectors are passed between functions of one file only
    sources = [*native, _Source("serving.cpp"), _Source("layer.cpp")]
    sources.append(_Source("level_vectors.cpp", ("-Wno-psabi",)))
    if platform.machine() in ("x86_64", "AMD64"):
        tiles = (*_AVX512, "-mamx-tile", "-mamx-bf16")
        sources += [
            _Source("level_vectors.cpp", (*_AVX2, "-Wno-psabi"), is_optional=True),
            _Source("level_avx512.cpp", _AVX512, is_optional=True),
            _Source("level_amx.cpp", tiles, is_optional=True),
        ]
    return sources


_FOR_THIS_MACHINE = ("kernels", "attention", "step")  # the others choose while they run


def serves(*tensors: Tensor | None) -> bool:
    """Whether compiled functions may be given these tensors (None counts as yes)."""
    return (
        _is_enabled
        and all(
            each is None
            or (type(each) in _PLAIN and each.dtype == torch.bfloat16 and each.device.type == "cpu")
            for each in tensors
        )
        and library() is not None
    )


@contextmanager
def plain() -> Iterator[None]:
    """Inside, `serves` says no: to compare with the plain code."""
    global _is_enabled
    before, _is_enabled = _is_enabled, False
    try:
        yield
    finally:
        _is_enabled = before


@cache
def function(name: str, signature: str) -> Callable[..., None]:
    """`phalanx_<name>` of the library; ask `serves` first.

    Args:
        signature: a letter per argument: p an address or None, i int64, f float32.
    """
    loaded = library()
    assert loaded is not None, "ask `serves` first"
    found = getattr(loaded, f"phalanx_{name}")
    types = {"p": ctypes.c_void_p, "i": ctypes.c_int64, "f": ctypes.c_float}
    found.argtypes, found.restype = [types[letter] for letter in signature], None
    return found


@cache
def library() -> ctypes.CDLL | None:
    """The library, compiled first where that has not been done; None without a compiler."""
    compiler = next(filter(None, map(which, _COMPILERS)), None)
    if compiler is None:
        _say_plain("there is no C++ compiler (g++ or clang++)")
        return None
    version = subprocess.run([compiler, "--version"], capture_output=True, text=True).stdout
    code = [path.read_text() for path in sorted(_FOLDER.glob("*.[ch]*")) if path.suffix != ".so"]
    made_of = (code, _FLAGS, _sources(), version, platform.machine(), _processor_flags())
    path = cache_folder("native") / f"{content_key(*made_of)}.so"
    try:
        return ctypes.CDLL(str(cached_file(path, lambda new: _build(compiler, new))))
    except subprocess.CalledProcessError as error:
        _say_plain(f"{compiler} failed: {error.stderr.strip().splitlines()[-1:]}")
    except OSError as error:
        _say_plain(str(error))
    return None


def _build(compiler: str, new: Path) -> None:
    def compiled(numbered: tuple[int, _Source]) -> str | None:
        number, source = numbered
        to, file = new.parent / f"{number}.o", _FOLDER / source.file
        command = [compiler, *_FLAGS, *source.flags, "-c", "-o", str(to), str(file)]
        try:
            subprocess.run(command, check=True, capture_output=True, text=True)
        except subprocess.CalledProcessError:
            if not source.is_optional:
                raise
            flags = " ".join(source.flags)
            warnings.warn(f"{compiler} does not know all of {flags}: left out", stacklevel=3)
            return None
        return str(to)

    with ThreadPoolExecutor(max_workers=4) as pool:
        objects = list(filter(None, pool.map(compiled, enumerate(_sources()))))
    command = [compiler, "-shared", "-fopenmp", "-o", str(new), *objects]
    subprocess.run(command, check=True, capture_output=True, text=True)


def _processor_flags() -> str:
    """What -march=native goes by."""
    info = Path("/proc/cpuinfo")
    if not info.exists():
        return platform.processor()
    names = ("model name", "flags", "Features")
    lines = info.read_text().splitlines()
    return "\n".join(sorted({line for line in lines if line.split("\t")[0] in names}))


def _say_plain(why: str) -> None:
    warnings.warn(f"bfloat16 work on this CPU runs as plain torch operators: {why}", stacklevel=3)


def address(tensor: Tensor | None) -> int | None:
    """Where a tensor's elements begin."""
    return None if tensor is None else tensor.data_ptr()

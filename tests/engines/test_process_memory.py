"""What the C library keeps of blocks that were freed."""

import ctypes
import subprocess
import sys

import pytest

BLOCK_BYTES = 8 << 20
HOLES = f"""
import ctypes, sys
from phalanx.engines.memory import process_bytes, return_large_blocks

libc = ctypes.CDLL(None)
libc.malloc.restype, libc.free.argtypes = ctypes.c_void_p, [ctypes.c_void_p]
libc.free(libc.malloc(2 * {BLOCK_BYTES}))  # raises glibc's limit for blocks of its own
if sys.argv[1] == "returned":
    return_large_blocks()
blocks = []
for _ in range(8):
    blocks.append(libc.malloc({BLOCK_BYTES}))
    ctypes.memset(blocks[-1], 1, {BLOCK_BYTES})
    libc.malloc(1 << 16)  # lives on
for block in blocks:
    libc.free(block)
print(process_bytes().unused)
"""
SMALL = """
import ctypes
from phalanx.engines.memory import make_room, process_bytes, return_free_memory

libc = ctypes.CDLL(None)
libc.malloc.restype, libc.free.argtypes = ctypes.c_void_p, [ctypes.c_void_p]
before, blocks = process_bytes().rss, []
for _ in range(2048):
    blocks.append(libc.malloc(1 << 14))
    ctypes.memset(blocks[-1], 1, 1 << 14)
    libc.malloc(64)  # lives on
for block in blocks:
    libc.free(block)
ASK
print(process_bytes().rss - before)
"""


@pytest.mark.skipif(not hasattr(ctypes.CDLL(None), "mallinfo2"), reason="not glibc")
def test_small_blocks_that_were_freed_go_back_when_asked():
    script = SMALL.replace("ASK", "return_free_memory()")
    kept, returned = _printed(SMALL.replace("ASK", "None")), _printed(script)
    assert kept > 30 << 20 and returned < kept / 2


@pytest.mark.skipif(not hasattr(ctypes.CDLL(None), "mallinfo2"), reason="not glibc")
def test_they_go_back_before_a_large_block_is_taken_and_stay_before_a_small_one():
    large, small = (
        _printed(SMALL.replace("ASK", f"make_room({num_bytes})"))
        for num_bytes in (1 << 26, 1 << 20)
    )
    assert small > 30 << 20 and large < small / 2


@pytest.mark.skipif(not hasattr(ctypes.CDLL(None), "mallinfo2"), reason="not glibc")
def test_freed_blocks_leave_no_holes_between_those_that_live_on():
    assert _printed(HOLES, "kept") >= 8 * BLOCK_BYTES
    assert _printed(HOLES, "returned") < BLOCK_BYTES


def _printed(*arguments: str) -> int:
    command = [sys.executable, "-c", *arguments]
    return int(subprocess.run(command, capture_output=True, check=True, timeout=60).stdout)

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


@pytest.mark.skipif(not hasattr(ctypes.CDLL(None), "mallinfo2"), reason="not glibc")
def test_freed_blocks_leave_no_holes_between_those_that_live_on():
    def unused(how: str) -> int:
        command = [sys.executable, "-c", HOLES, how]
        return int(subprocess.run(command, capture_output=True, check=True, timeout=60).stdout)

    assert unused("kept") >= 8 * BLOCK_BYTES
    assert unused("returned") < BLOCK_BYTES

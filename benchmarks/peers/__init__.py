"""Loops that a user would write or pick instead of `phalanx train`, one small file each.

Every module has `NAME`, `NUM_PROCESSES` and `build(case) -> Callable[[int], Parts | None]`: the
function does step `number` of the case, forward, backward and update, on this process's rows.
"""

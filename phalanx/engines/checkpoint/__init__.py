"""Checkpoints of training: safetensors and JSON, written behind the steps, read on any mesh.

with StopSignal() as stop:
    checkpoints = Checkpoints(folder, model, optimizer, process, keep=2, job_key=key)
    checkpoints.require_space()
    if path := latest(folder):
        progress = restore(path, model, optimizer, process, job_key=key)
    ...
    checkpoints.save(Progress(step=37, next_sample=1200))
    checkpoints.close()
"""

from phalanx.engines.checkpoint.manifest import Manifest, latest
from phalanx.engines.checkpoint.progress import Progress
from phalanx.engines.checkpoint.reader import restore, restore_latest
from phalanx.engines.checkpoint.saver import Checkpoints
from phalanx.engines.checkpoint.stop import StopSignal

__all__ = [
    "Checkpoints",
    "Manifest",
    "Progress",
    "StopSignal",
    "latest",
    "restore",
    "restore_latest",
]

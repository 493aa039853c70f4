"""Configurations of other programs as plans: accelerate, axolotl, Megatron, torchtitan, TRL, vLLM.

Programs are recognised by what stands in a file. `importers/<program>.py` says what each key means;
`keys/<program>.json` lists the keys of the version that was read for it, so that a key that has no
counterpart is told apart from one that does not exist.
"""

from phalanx.planner.importers.convert import (
    changes,
    foreign_plans,
    job_keys,
    told,
    with_step_rows,
)
from phalanx.planner.importers.foreign import ALL_LEFT, ForeignPlan, Note, software_of
from phalanx.planner.importers.recognise import KINDS, importer, read_foreign, read_text
from phalanx.planner.importers.sizes import config_file

__all__ = [
    "ALL_LEFT",
    "KINDS",
    "ForeignPlan",
    "Note",
    "changes",
    "config_file",
    "foreign_plans",
    "importer",
    "job_keys",
    "read_foreign",
    "read_text",
    "software_of",
    "told",
    "with_step_rows",
]

"""What is asked: a job, from a TOML file, from flags, or from both.

`[model] [data] [train] [serve] [objective] [limits]` change the result; `[plan]` never does: it
only says how and where. Every key is also a flag (`--train.lr 1e-4`), a flag beats the file, and
`origin` says for each value where it came from.
"""

from phalanx.job.load import Job, load_job, parse_flags
from phalanx.job.recorded import Change, changes
from phalanx.job.sections import (
    DataSection,
    LimitsSection,
    ModelSection,
    ObjectiveSection,
    PlanSection,
    ServeSection,
    TrainSection,
)

__all__ = [
    "Change",
    "DataSection",
    "Job",
    "LimitsSection",
    "ModelSection",
    "ObjectiveSection",
    "PlanSection",
    "ServeSection",
    "TrainSection",
    "changes",
    "load_job",
    "parse_flags",
]

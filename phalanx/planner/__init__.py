"""From a job and a cluster to a plan, without torch."""

from phalanx.planner.make import Planned, make_plan
from phalanx.planner.work import model_work, work_of

__all__ = ["Planned", "make_plan", "model_work", "work_of"]

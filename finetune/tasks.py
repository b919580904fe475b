"""Every task by the name it has on the command line."""

from .mlm import MaskedLM
from .qa import QA
from .run import run
from .summarise import Summarise
from .task import Task

TASKS: dict[str, type[Task]] = {task.name: task for task in (QA, Summarise, MaskedLM)}

__all__ = ["TASKS", "run"]

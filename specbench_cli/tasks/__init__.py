"""Tasks: what the methods are run on, where it comes from, and how it becomes token ids."""

from specbench_cli.tasks.load import Task, describe, load_task, select, task_names
from specbench_cli.tasks.sample import sample
from specbench_cli.tasks.schema import FAMILIES, Family, Question
from specbench_cli.tasks.template import answer_text, conversation, render

__all__ = [
    "FAMILIES",
    "Family",
    "Question",
    "Task",
    "answer_text",
    "conversation",
    "describe",
    "load_task",
    "render",
    "sample",
    "select",
    "task_names",
]

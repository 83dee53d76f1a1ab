"""Tasks: what the methods are run on, where it comes from, and how it becomes token ids."""

from specbench_cli.tasks.card import json_schema
from specbench_cli.tasks.load import Task, describe, load_task, select, task_names
from specbench_cli.tasks.sample import sample
from specbench_cli.tasks.schema import FAMILIES, Family, Question, Scorer
from specbench_cli.tasks.template import answer_text, conversation, render, written_text

__all__ = [
    "FAMILIES",
    "Family",
    "Question",
    "Scorer",
    "Task",
    "answer_text",
    "conversation",
    "describe",
    "json_schema",
    "load_task",
    "render",
    "sample",
    "select",
    "task_names",
    "written_text",
]

"""Tasks: sets of questions, the datasets that they come from, and their conversion to token ids."""

from specbench_cli.tasks.dataset_config import json_schema
from specbench_cli.tasks.load import Task, describe, load_task, select_questions, task_names
from specbench_cli.tasks.sample import sample_questions
from specbench_cli.tasks.schema import FAMILIES, Family, Question, Scorer
from specbench_cli.tasks.template import build_messages, decode_answer, decode_text, render_prompt

__all__ = [
    "FAMILIES",
    "Family",
    "Question",
    "Scorer",
    "Task",
    "build_messages",
    "decode_answer",
    "decode_text",
    "describe",
    "json_schema",
    "load_task",
    "render_prompt",
    "sample_questions",
    "select_questions",
    "task_names",
]

"""Generators of the tasks that specbench ships. The embedded models can solve most of them.

- `mini`: held-out combinations of wordings and words from all six families.
- `best-of-n`: prompts like those of `mini`. Each prompt is decoded several times.
- `agentic` and `repair`: conversations of several turns in which prompts, tool output and answers
  repeat. No model was trained on them.
- `chains`: answers in steps, one per line, which `scoring.right_steps` can check. The target gets
  nearly all of them right, the draft about half.

    python -m recipes.tasks TASK > datasets_cfg/TASK/TASK.jsonl
"""

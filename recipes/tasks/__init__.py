"""Generators of the tasks that specbench ships, from the skills that the embedded family learned.

- `mini`: the held-out combinations of all six families.
- `best-of-n`: wordings and words like those of `mini`, each prompt asked several times.
- `agentic` and `repair`: conversations of several turns in which prompts, tool output and answers
  return. No model was trained on them.
- `chains`: answers in steps, one per line, which `scoring.right_steps` can check. The target gets
  nearly all of them right, the draft about half.

    python -m recipes.tasks TASK > datasets_cfg/TASK/TASK.jsonl
"""

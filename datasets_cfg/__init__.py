"""One YAML file a dataset, and the embedded `mini` task. See README, "Add a task"."""

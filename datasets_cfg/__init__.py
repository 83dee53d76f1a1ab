"""One YAML file a dataset, and the files of the generated tasks. See docs/how-to/tasks.md."""

"""Programs that made what specbench ships. They are not in the wheel."""

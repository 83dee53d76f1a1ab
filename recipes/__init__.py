"""Programs that generate the data that specbench ships. They are not in the wheel."""

"""From a configuration to records on disk: plan, cells, quiet windows, passes, resume."""

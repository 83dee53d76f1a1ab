"""Starting points of methods, one file per kind: valid plug-ins that pass the audit.

`specbench new-method` copies one of them, and replaces its class, parameters and name.
"""

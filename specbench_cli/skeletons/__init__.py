"""Templates of new methods, one file per kind of method. They are valid plug-ins that pass the
audit.

`specbench new-method` copies one of these files, and replaces the class, the parameters and the
name in it.
"""

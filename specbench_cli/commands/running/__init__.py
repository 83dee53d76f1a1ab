"""What `specbench run` does once its options are read: one run, or those of a matrix."""

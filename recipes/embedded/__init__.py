"""Training and evaluation of the small models that specbench ships (the embedded family)."""

"""Code behind `specbench train`: training texts, replies of the target, losses, training loop,
heads.
"""

"""The modes of `specbench predict`: measure forwards, use a roofline model, simulate load or
settings.
"""

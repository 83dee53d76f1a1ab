"""Programs that generate the data files of specbench. The programs themselves are not in the
wheel.
"""

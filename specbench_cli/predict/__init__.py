"""The time that a run's decoding takes at other costs: another machine, a roofline, a load."""

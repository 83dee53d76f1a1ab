"""Parts of `specbench predict`: probes of this machine, and models of other hardware."""

"""What `specbench predict` asks of this machine, and of one that is not here."""

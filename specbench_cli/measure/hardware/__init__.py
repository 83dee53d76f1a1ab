"""What a machine is able to do: the roofs of its devices, the energy they draw."""

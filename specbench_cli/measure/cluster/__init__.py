"""A pass that is dealt to the devices of several machines; Ray is what they are reached by."""

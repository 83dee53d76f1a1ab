"""DFlash: the method and its head."""

"""Heads whose torch module, which is trained, is what decodes too."""

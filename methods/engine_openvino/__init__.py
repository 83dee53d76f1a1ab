"""Decoding with OpenVINO GenAI: the methods and the code that runs its pipeline."""

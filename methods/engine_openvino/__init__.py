"""OpenVINO GenAI as an engine: the methods and the pipeline."""

"""llama.cpp as an engine: the methods and the binding."""

"""Decoding with llama.cpp: the methods and the code that calls llama-cpp-python."""

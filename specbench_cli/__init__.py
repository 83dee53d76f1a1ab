"""specbench: which speculative-decoding method is fastest here, by how much, and how sure are we?"""

__version__ = "0.1.0"

"""Decoding methods. Each is one file or folder, and its code follows the steps of its paper."""

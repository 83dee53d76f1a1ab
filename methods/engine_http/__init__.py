"""Decoding with inference servers: the methods, the HTTP client, and the request format of each
server.
"""

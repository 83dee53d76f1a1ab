"""Servers as engines: the methods, the client, and each kind of server."""

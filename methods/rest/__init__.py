"""REST: the decoding method and its datastore."""

"""REST: the method and its datastore."""

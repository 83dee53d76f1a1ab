"""What a change is held against: figures of a run, in a file of their own."""

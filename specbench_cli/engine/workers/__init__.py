"""Workers beside the target's: where drafts are made while the target computes."""

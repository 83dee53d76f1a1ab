"""SuffixDecoding: the method, its suffix tree, and the eviction of outputs from it."""

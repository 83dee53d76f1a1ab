"""SuffixDecoding: the method, its suffix tree, and which outputs leave that."""

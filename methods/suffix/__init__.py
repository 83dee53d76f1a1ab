"""SuffixDecoding: the decoding method, its suffix tree, and the eviction of outputs from the
tree.
"""

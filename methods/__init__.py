"""One method = one file that reads like its paper; methods never import each other."""

"""Records of runs to tables and figures, in the form of the paper."""

"""Turn records of runs into the paper's tables and figures."""

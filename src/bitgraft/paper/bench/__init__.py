"""Suites of runs: data sets, methods and seeds under one protocol, and a record of each run."""

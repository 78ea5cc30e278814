"""Benchmark suites: data sets, methods and seeds under one protocol, with a record of each run."""

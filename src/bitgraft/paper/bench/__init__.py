"""Benchmark suites: data sets, methods and seeds under one protocol, with a record of each run.

May import: paper/report, and what paper may.
"""

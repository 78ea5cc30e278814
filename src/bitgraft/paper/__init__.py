"""What papers need and services do not: benchmark suites, reports, scores, parameter counts, figures, the demo.

May import: workflows, sharing and what is below them.
"""

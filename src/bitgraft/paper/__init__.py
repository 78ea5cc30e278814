"""Research tools: benchmark suites, reports, scores, parameter counts, figures and the demo.

May import: workflows, sharing and what is below them.
"""

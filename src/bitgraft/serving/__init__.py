"""Serve every task of a store over HTTP: `bitgraft serve`, in local processes or on Ray. See docs/serving.md.

May import: workflows, sharing and everything below; not paper.
"""

"""Every task of a store over HTTP: `bitgraft serve`, in this process or on Ray. docs/serving.md says how it behaves.

May import: workflows, sharing and everything below; not paper.
"""

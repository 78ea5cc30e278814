"""The command line, one module per subject. No command loads torch before it runs, so --help is quick.

May import: everything else.
"""

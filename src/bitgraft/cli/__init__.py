"""The command line: thin commands, by subject. None loads torch before it runs, so that --help is quick.

May import: everything else.
"""

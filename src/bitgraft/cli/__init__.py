"""The command line: one thin file per command. None loads torch before it runs, so that --help is quick.

May import: everything else.
"""

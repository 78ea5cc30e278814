"""The command line: one thin file per command, none of which loads torch before it runs."""

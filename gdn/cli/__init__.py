"""The command line: `gdn`, or `python -m gdn`."""

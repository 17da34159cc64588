"""The command line: `shiplap VERB`."""

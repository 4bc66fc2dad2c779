"""The command line: parse, call, print. Nothing imports this package."""

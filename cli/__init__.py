"""Command line: parse, call, print. Each module is a command of ``eldr-sim``."""

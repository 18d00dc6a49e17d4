"""The command line: a thin shell over the library."""

from windowed_mtp.cli.app import main

__all__ = ["main"]

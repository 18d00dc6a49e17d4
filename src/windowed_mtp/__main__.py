"""``python -m windowed_mtp``: the command line."""

import sys

from windowed_mtp.cli import main

if __name__ == "__main__":
    sys.exit(main())

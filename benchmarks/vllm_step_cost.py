"""The step-cost benchmark of docs/results.md; the same as ``windowed-mtp bench --engine vllm``."""

import sys

from windowed_mtp.cli import main

if __name__ == "__main__":
    sys.argv.insert(1, "bench")
    sys.exit(main())

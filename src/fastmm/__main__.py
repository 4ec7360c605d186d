"""``python -m fastmm`` is the command ``fastmm``."""

import sys

from .cli import main

if __name__ == "__main__":
    sys.exit(main())

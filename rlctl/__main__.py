"""``python -m rlctl``."""

import sys

from rlctl.cli import main

if __name__ == "__main__":
    sys.exit(main())

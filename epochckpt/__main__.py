"""`python -m epochckpt`."""

import sys

from epochckpt.cli.main import main

if __name__ == "__main__":
    sys.exit(main())

"""Runs the chaos suite: see runner.py."""

import sys

from tests.chaos.runner import main

if __name__ == "__main__":
    sys.exit(main())

"""`python -m gradferry`: the same as the `gradferry` command."""

import sys

from gradferry_lab.cli import main

if __name__ == "__main__":
    sys.exit(main())

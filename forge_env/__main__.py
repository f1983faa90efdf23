"""`python -m forge_env`: run the command line without the console script."""

import sys

from forge_env.cli.main import main

if __name__ == "__main__":
    sys.exit(main())

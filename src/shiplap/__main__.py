"""`python -m shiplap VERB`, the same as `shiplap VERB`."""

import sys

from shiplap.commands.main import main

if __name__ == "__main__":
    sys.exit(main())

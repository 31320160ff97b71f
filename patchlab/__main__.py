"""`python -m patchlab`; see `patchlab.ship.command_line`."""

from __future__ import annotations

import sys

from patchlab.ship.command_line import main

if __name__ == "__main__":
    sys.exit(main())

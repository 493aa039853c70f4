"""`python -m phalanx.cli`: the command line where the `phalanx` script is not installed."""

from __future__ import annotations

import sys

from phalanx.cli import main

sys.exit(main())

"""`python -m phalanx`: the command line where a module is asked for, as torchrun does."""

from __future__ import annotations

import sys

from phalanx.cli import main

sys.exit(main())

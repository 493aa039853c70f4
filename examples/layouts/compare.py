"""Train the same small decoder under several layouts and put their losses side by side.

    python examples/layouts/compare.py [NAME ...]

NAME is a file beside this one, without ".toml"; all of them by default. Exits with 1 where a loss
differs from that of one process by more than 1e-5 (float32, learning rate 1e-3), or is none.
"""

from __future__ import annotations

import math
import sys
import tempfile
from pathlib import Path

import phalanx

HERE = Path(__file__).parent
BASE, TOLERANCE = "one", 1e-5


def losses(name: str, folder: Path) -> list[float]:
    """The loss of each step of a layout."""
    run = phalanx.train(HERE / f"{name}.toml", folder=folder / name, say=lambda _: None)
    table = run.to_pandas()
    return table.loc[table["kind"] == "step", "loss"].tolist()


def furthest(one: list[float], other: list[float]) -> float:
    """The largest difference between losses of the same step; infinite for a loss that is none."""
    differences = [abs(a - b) for a, b in zip(one, other, strict=True)]
    return max(apart if math.isfinite(apart) else math.inf for apart in differences)


def main(names: list[str]) -> int:
    """Train, print, compare."""
    known = sorted(path.stem for path in HERE.glob("*.toml") if path.stem != BASE)
    if unknown := [name for name in names if name not in known]:
        print(f"no layout {', '.join(unknown)}; there are {', '.join(known)}", file=sys.stderr)
        return 2
    others = names or known
    with tempfile.TemporaryDirectory() as folder:
        base = losses(BASE, Path(folder))
        print(f"{BASE:>10}: {base[0]:.6f} ... {base[-1]:.6f} in {len(base)} steps")
        worst = 0.0
        for name in others:
            found = losses(name, Path(folder))
            apart = furthest(base, found)
            worst = max(worst, apart)
            print(f"{name:>10}: {found[0]:.6f} ... {found[-1]:.6f}, at most {apart:.1e} apart")
    return int(worst > TOLERANCE)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))

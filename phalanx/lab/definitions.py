"""What the page's words mean: classes of rows, minimum inputs, and what is implied."""

from __future__ import annotations

import inspect
from collections.abc import Iterator

from phalanx.lab import row_class, row_plan
from phalanx.lab.markdown import wrapped


def definitions() -> Iterator[str]:
    """Lines of Markdown, from the code that does it."""
    yield "## Classes of rows, and minimum inputs"
    yield ""
    yield inspect.cleandoc(row_class.__doc__ or "").split("\n\n", 1)[1]
    yield "| serving | all rows of a serving table |"
    yield ""
    for name, sources in (("GRIDS", row_class.GRIDS), ("VENDORS", row_class.VENDORS)):
        yield f"`{name}` are sources whose names start with {', '.join(sources)}."
    yield ""
    yield wrapped(
        "A training row needs an accelerator of `phalanx/hardware`, `n_devices`, `dtype`, "
        "`seq_len_tokens`, a model (a known name, or `layers`, `hidden`, `heads`, `ffn`, `vocab`), "
        "`tp`, `pp`, `cp` and `dp` as far as `n_devices` does not give them, and the batch. A "
        "serving row needs a known model and accelerator, how the engine cuts the model, lengths "
        "of prompts and answers, and the load: a concurrency, a static batch, or a load without "
        "end. Of a row of reinforcement learning, generation is read from the notes "
        "(`lab/rl_rows.py`). All else is insufficient input. What tables leave out because it is "
        "implied:"
    )
    yield ""
    yield inspect.cleandoc(row_plan.__doc__ or "").split("\n\n", 2)[2]

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
        "A training row needs an accelerator, `n_devices`, `dtype`, `seq_len_tokens`, a model (a "
        "known name, or `layers`, `hidden`, `heads`, `ffn`, `vocab`), `tp`, `pp`, `cp` and `dp` as "
        "far as `n_devices` does not give them, and the batch. A serving row needs a model "
        "(likewise) and an accelerator, how the engine cuts the model, lengths of prompts and "
        "answers, and the load: a concurrency, a static batch, a load without end, or a number of "
        "requests at a rate. An accelerator, or the model of a serving row, that Phalanx does not "
        "know is no missing input: such rows count as not covered. Of a row of reinforcement "
        "learning, generation is read from the notes (`lab/rl_rows.py`). All else is insufficient "
        'input; so is a row with text where a number belongs ("4-8"), while "n/a" and the like are '
        "empty. Columns may be absent but for those that say who measured what on which device; "
        'capitals mean nothing, and formats of numbers may be spelled as "bfloat16" or "E4M3". '
        "What tables leave out because it is implied:"
    )
    yield ""
    yield inspect.cleandoc(row_plan.__doc__ or "").split("\n\n", 2)[2]

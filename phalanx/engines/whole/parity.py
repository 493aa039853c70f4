"""Is the exported folder the model that was trained, for others too?

    python -m phalanx.engines.whole.parity FOLDER < rows.json

compares fp32 logits of our decoder with transformers' on rows of token ids, and prints one JSON
line. A process of its own, so that two models never stay in the memory of a run.
"""

from __future__ import annotations

import json
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch

from phalanx.models.hf import load_decoder


def compare_logits(folder: str | Path, rows: Sequence[Sequence[int]]) -> dict[str, Any]:
    """Largest distance of logits and how often the first choice agrees.

    Args:
        folder: exported model.
        rows: token ids, each row by itself.

    Returns:
        "max_abs_diff" of fp32 logits, "top1_agreement" in 0..1, "num_positions", and the version
        of transformers; {"skipped": reason} where transformers is not installed.
    """
    try:
        import transformers
    except ModuleNotFoundError:
        return {"skipped": "transformers is not installed (the hf extra)"}
    transformers.logging.set_verbosity_error()
    theirs = transformers.AutoModelForCausalLM.from_pretrained(str(folder), dtype=torch.float32)
    theirs.eval()
    ours = load_decoder(folder, dtype="float32")
    worst, agree, positions = 0.0, 0, 0
    with torch.inference_mode():
        for row in rows:
            tokens_S = torch.tensor(row)
            wanted_SV = theirs(tokens_S[None], use_cache=False).logits[0]
            found_SV = ours.logits(ours(tokens_S))
            worst = max(worst, (found_SV - wanted_SV).abs().max().item())
            agree += int((found_SV.argmax(-1) == wanted_SV.argmax(-1)).sum())
            positions += len(row)
    return {
        "max_abs_diff": worst,
        "top1_agreement": agree / positions,
        "num_positions": positions,
        "transformers": transformers.__version__,
    }


if __name__ == "__main__":
    print(json.dumps(compare_logits(sys.argv[1], json.load(sys.stdin))))

"""Run by the Python that has vllm: token ids in, its choice at each of the last positions out.

    PYTHON -c "$(cat vllm_script.py)" < question.json

Imports nothing of Phalanx, which need not be installed there. The given tokens are a prompt, whose
log probabilities tell the most probable token at every position.
"""

import json
import os
import sys


def choices(llm, sampling, sequences: list[list[int]], num_new: int) -> list[list[int]]:
    """The most probable token at the last `num_new` positions of each sequence."""
    outputs = llm.generate([{"prompt_token_ids": each} for each in sequences], sampling)
    return [
        [min(scores, key=lambda token: scores[token].rank) for scores in scored]
        for scored in (each.prompt_logprobs[-num_new:] for each in outputs)
    ]


def main() -> None:
    """Answer one question; the last line of the output is JSON."""
    question = json.load(sys.stdin)
    os.environ.setdefault("VLLM_CPU_KVCACHE_SPACE", "1")
    os.environ.setdefault("VLLM_LOGGING_LEVEL", "ERROR")
    import vllm

    llm = vllm.LLM(
        model=question["folder"],
        dtype=question["dtype"],
        enforce_eager=True,
        max_model_len=max(map(len, question["sequences"])) + 1,
        max_num_seqs=8,
        disable_log_stats=True,
    )
    sampling = vllm.SamplingParams(
        max_tokens=1, temperature=0.0, prompt_logprobs=1, detokenize=False
    )
    found = choices(llm, sampling, question["sequences"], question["num_new"])
    print(json.dumps({"choices": found, "version": vllm.__version__}))


if __name__ == "__main__":
    main()

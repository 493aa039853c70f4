"""`phalanx run` refuses before it trains what it would not serve afterwards."""

from __future__ import annotations

import pytest

from phalanx.cli import main
from tests.cli.train_inputs import FLAGS
from tests.tiny_run import write_base, write_pairs

pytestmark = pytest.mark.usefixtures("no_process")


@pytest.fixture
def refused(tmp_path, capsys):
    """The error of a run of a tiny model."""

    def go(**keys):
        base, data = write_base(tmp_path / "model"), write_pairs(tmp_path / "pairs.jsonl")
        flags = FLAGS | {"model.name": base, "data.source": data, "plan.devices": 2}
        flags |= {key.replace("__", "."): value for key, value in keys.items()}
        job = tmp_path / "job.toml"
        job.write_text("")
        words = [word for key, value in flags.items() for word in (f"--{key}", str(value))]
        assert main(["run", str(job), "--folder", str(tmp_path / "run"), *words]) == 2
        (line,) = [x for x in capsys.readouterr().err.splitlines() if x.startswith("error")]
        return line

    return go


@pytest.mark.parametrize(
    ("keys", "told"),
    [
        (
            {"serve__max_step_tokens": 4},
            "serve.max_step_tokens = 4: must be at least 16; nearest legal values: 16",
        ),
        (
            {"serve__max_tokens": 32, "serve__load_output_tokens": 32},
            "serve.load_output_tokens = 32: leaves no token of serve.max_tokens = 32 for a prompt; "
            "nearest legal values: 31",
        ),
        (
            {"serve__max_tokens": 1_000_000},
            "serve.max_tokens = 1000000: the model was not made for such positions",
        ),
        (
            {"serve__max_tokens": 64, "serve__load_output_tokens": 8, "serve__kv_tokens": 20},
            "serve.kv_tokens = 20: the KV cache must hold the longest request",
        ),
    ],
)
def test_what_could_not_be_served_is_not_trained(refused, keys, told):
    assert told in refused(**keys)

"""Where a model comes from: names are resolved, refused with a reason, and downloads kept small."""

from __future__ import annotations

from types import SimpleNamespace

import pytest

from phalanx.errors import JobError, PlanError
from phalanx.job import Job
from phalanx.job.sections import DataSection, ModelSection, TrainSection
from phalanx.models import hub
from phalanx.models.hf import save_folder
from phalanx.models.source import data_settings, model_folder, model_source
from tests.models.cases import CONFIGS, random_decoder

CONFIG = CONFIGS["grouped_queries"]


def quiet(_line: str) -> None:
    pass


def job(name: str, method: str = "full", **data) -> Job:
    return Job(
        model=ModelSection(name=name, dtype="float32"),
        train=TrainSection(method=method),
        data=DataSection(**data),
    )


@pytest.fixture
def folder(tmp_path):
    values = random_decoder(CONFIG).state_dict().items()
    return save_folder(tmp_path / "model", CONFIG, values, max_shard_bytes=30_000)


def test_folder_is_checked_by_its_headers(folder):
    found = model_source(job(str(folder)), quiet)
    assert set(found.weights) == set(random_decoder(CONFIG).state_dict())
    assert found.config == CONFIG and found.tokenizer_folder == found.folder == folder
    next(folder.glob("model-00002*")).unlink()
    with pytest.raises(JobError, match="absent"):
        model_source(job(str(folder)), quiet)


@pytest.mark.parametrize(("method", "weights"), [("pretrain", True), ("full", False)])
def test_nothing_is_asked_of_weights_that_are_not_read(folder, method, weights):
    for path in folder.glob("model*"):
        path.unlink()
    found = model_source(job(str(folder), method), quiet, weights=weights)
    assert found.folder is None and not found.weights and found.tokenizer_folder == folder


@pytest.mark.parametrize("method", ["lora", "full"])
def test_tiny_has_no_weights_to_start_from(method):
    with pytest.raises(PlanError, match="pretrain"):
        model_source(job("tiny", method), quiet)


def test_context_is_the_limit_of_rows_without_one():
    settings = data_settings(job("x", held_out_source="b", chat_template="c"), CONFIG)
    assert settings.context_tokens == CONFIG.max_positions and settings.max_tokens == 0
    assert (settings.held_out_source, settings.chat_template) == ("b", "c")


@pytest.mark.parametrize(
    ("name", "says"),
    [("nowhere", "gemma3-270m"), ("./a/b", "no folder"), ("x/y.gguf", "does not exist")],
)
def test_names_of_nothing_are_refused(name, says):
    with pytest.raises(JobError, match=says) as caught:
        model_folder(name, quiet)
    assert caught.value.code == "job/not-found"


def listed(**sizes: int):
    files = [SimpleNamespace(rfilename=n.replace("__", "."), size=s) for n, s in sizes.items()]
    return SimpleNamespace(siblings=files)


@pytest.fixture
def online(monkeypatch, tmp_path):
    """A Hub with what a test puts into `files`; downloads are noted in `asked`."""
    import huggingface_hub

    state = SimpleNamespace(files=listed(), asked=[], error=None)

    def model_info(_self, _name, files_metadata):
        if state.error:
            raise state.error
        return state.files

    def download(name, allow_patterns=None, local_files_only=False):
        if local_files_only:
            raise OSError("not here")
        state.asked.append(allow_patterns)
        return str(tmp_path)

    monkeypatch.setattr("huggingface_hub.constants.is_offline_mode", lambda: False)
    monkeypatch.setattr(huggingface_hub.HfApi, "model_info", model_info)
    monkeypatch.setattr(huggingface_hub, "snapshot_download", download)
    monkeypatch.setattr(hub, "_cache", lambda: str(tmp_path))
    return state


FILES = {"config__json": 9, "model-1__safetensors": 900, "model__bin": 900, "consolidated__pth": 9}


@pytest.mark.parametrize("weights", [True, False])
def test_only_safetensors_and_small_files_are_fetched(online, weights):
    online.files = listed(**FILES, **{"original/x__safetensors": 5})
    hub.hub_folder("a/b", quiet, weights=weights)
    wanted = ["config.json", *(["model-1.safetensors"] if weights else [])]
    assert online.asked == [wanted]


def test_models_of_pickles_are_refused_before_anything_is_fetched(online):
    online.files = listed(config__json=3, pytorch_model__bin=900)
    with pytest.raises(JobError, match=r"pytorch_model\.bin") as caught:
        hub.hub_folder("a/b", quiet)
    assert caught.value.code == "environment/trust" and not online.asked


def test_disk_is_asked_before_anything_is_fetched(online):
    online.files = listed(model__safetensors=10**18)
    with pytest.raises(JobError, match="free") as caught:
        hub.hub_folder("a/b", quiet)
    assert caught.value.code == "environment/disk" and not online.asked


def test_unreachable_hub_without_a_copy_is_one_line(online):
    online.error = ConnectionError("no route")
    with pytest.raises(JobError, match="no route") as caught:
        hub.hub_folder("a/b", quiet)
    assert caught.value.code == "job/not-found"


def test_offline_mode_takes_what_is_there(online, monkeypatch):
    monkeypatch.setattr("huggingface_hub.constants.is_offline_mode", lambda: True)
    with pytest.raises(JobError, match="HF_HUB_OFFLINE"):
        hub.hub_folder("a/b", quiet)

"""Models of the Hugging Face Hub: config, tokenizer and safetensors, nothing that could run code.

HF_HOME, HF_TOKEN and offline mode are honoured by huggingface_hub, which keeps the files. No torch.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from fnmatch import fnmatchcase
from pathlib import Path
from typing import Any

from phalanx.errors import JobError
from phalanx.models.folders import require_free

SIDE_FILES = ("*.json", "*.jinja", "tokenizer.model", "LICENSE*", "NOTICE*", "Notice")
WEIGHT_FILES = ("model*.safetensors",)
_PICKLES = ("*.bin", "*.pt", "*.pth", "*.ckpt")


def hub_folder(name: str, log: Callable[[str], None] = print, *, weights: bool = True) -> Path:
    """The folder of a model of the Hub, fetched if it is not here.

    Args:
        name: owner/name.
        weights: fetch them too; otherwise config and tokenizer only.

    Raises:
        JobError: `job/not-found` when there is no such model here or there, `environment/trust`
            when its weights are pickles only, `environment/disk` when it would not fit.
    """
    from huggingface_hub.constants import is_offline_mode

    patterns = [*SIDE_FILES, *(WEIGHT_FILES if weights else ())]
    if is_offline_mode():
        return _kept(name, "was not fetched before offline mode (HF_HUB_OFFLINE) was set")
    return _fetched(name, patterns, log, weights)


def _fetched(name: str, patterns: list[str], log: Callable[[str], None], weights: bool) -> Path:
    from huggingface_hub import HfApi, snapshot_download
    from huggingface_hub.errors import HfHubHTTPError, HFValidationError

    no_connection: Any = HfHubHTTPError.__bases__[0]  # of the HTTP library that this release uses
    try:
        files = HfApi().model_info(name, files_metadata=True).siblings or []
        top = {each.rfilename: each.size or 0 for each in files if "/" not in each.rfilename}
        chosen = [file for file in top if _matches(file, patterns)]
        if weights:
            _require_safetensors(name, list(top))
        missing = [file for file in chosen if not _is_kept(name, file)]
        num_bytes = sum(top[file] for file in missing)
        if missing:
            require_free(_cache(), num_bytes)
            log(f"fetching {name} from the Hugging Face Hub ({num_bytes / 1e9:.2f} GB)")
        return Path(snapshot_download(name, allow_patterns=chosen))
    except HFValidationError as error:
        raise JobError("job/not-found", "model.name", name, "is no name of the Hub") from error
    except HfHubHTTPError as error:
        rule = f"cannot be fetched from the Hub: {_first_line(error)}"
        raise JobError("job/not-found", "model.name", name, rule) from error
    except (OSError, no_connection) as error:
        reason = f"the Hub cannot be reached ({_first_line(error)})"
        folder = _kept(name, f"was not fetched before, and {reason}")
        log(f"{reason}; using the copy of {name} that was fetched before")
        return folder


def _require_safetensors(name: str, files: Sequence[str]) -> None:
    if any(_matches(file, WEIGHT_FILES) for file in files):
        return
    pickles = [file for file in files if _matches(file, _PICKLES)]
    if pickles:
        rule = (
            f"holds weights only as pickle ({pickles[0]}), which can run code when it is read; "
            "convert it where you trust it: save_pretrained of transformers writes safetensors"
        )
        raise JobError("environment/trust", "model.name", name, rule)
    raise JobError("job/not-found", "model.name", name, "has no model*.safetensors")


def _matches(file: str, patterns: Sequence[str]) -> bool:
    return any(fnmatchcase(file, pattern) for pattern in patterns)


def _cache() -> str:
    from huggingface_hub.constants import HF_HUB_CACHE

    return HF_HUB_CACHE


def _is_kept(name: str, file: str) -> bool:
    from huggingface_hub import try_to_load_from_cache

    return isinstance(try_to_load_from_cache(name, file), str)


def _kept(name: str, rule: str) -> Path:
    from huggingface_hub import snapshot_download
    from huggingface_hub.errors import HFValidationError

    try:
        return Path(snapshot_download(name, local_files_only=True))
    except (OSError, HFValidationError) as error:
        raise JobError("job/not-found", "model.name", name, rule) from error


def _first_line(error: Exception) -> str:
    return (str(error).splitlines() or [type(error).__name__])[0]

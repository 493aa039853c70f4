"""Each target's own reader of its files, where the target is installed.

`make install` brings accelerate, transformers and TRL; the others are checked wherever somebody has
them. What a parser refuses, it raises.
"""

from importlib.util import find_spec
from pathlib import Path

import yaml

FOLDER_OF_VERL = "verl.trainer.config"


def accelerate(folder: Path) -> None:
    from accelerate.commands.config.config_args import ClusterConfig, load_config_from_file
    from accelerate.commands.launch import launch_command_parser

    read = load_config_from_file(str(folder / "accelerate.yaml"))
    assert isinstance(read, ClusterConfig)
    known = {action.dest for action in launch_command_parser()._actions}
    for table in (read.fsdp_config, read.parallelism_config):
        assert set(table) <= known, sorted(set(table) - known)


def trl(folder: Path) -> None:
    from trl import DatasetMixtureConfig, ModelConfig, ScriptArguments, SFTConfig, TrlParser

    parser = TrlParser((ScriptArguments, SFTConfig, ModelConfig, DatasetMixtureConfig))
    arguments = ["--config", str(folder / "sft.yaml"), "--use_cpu", "true"]
    written = yaml.safe_load((folder / "sft.yaml").read_text())
    if written["fp16"] or written["bf16"]:
        arguments += ["--bf16", "false", "--fp16", "false"]  # this processor may have neither
    _, training, model, _ = parser.parse_args_and_config(arguments, fail_with_unknown_args=True)
    assert model.model_name_or_path == written["model_name_or_path"]
    assert training.activation_checkpointing == written["activation_checkpointing"]
    assert training.max_length == written["max_length"]


def torchtitan(folder: Path) -> None:
    from torchtitan.config import ConfigManager

    read = ConfigManager().parse_args(["--job.config_file", str(folder / "torchtitan.toml")])
    assert read.job.description == "planned by Phalanx"


def megatron(folder: Path) -> None:
    from argparse import ArgumentParser

    from megatron.training.arguments import add_megatron_arguments

    from phalanx.planner.importers.shell import commands

    *_, words = commands((folder / "megatron.sh").read_text(), "megatron.sh")
    texts = [word.text for word in words]
    parser = add_megatron_arguments(ArgumentParser(allow_abbrev=False))
    parser.parse_args(texts[texts.index("pretrain_gpt.py") + 1 :])


def vllm(folder: Path) -> None:
    from vllm.engine.arg_utils import AsyncEngineArgs
    from vllm.utils.argparse_utils import FlexibleArgumentParser

    from phalanx.planner.importers.shell import commands

    *_, words = commands((folder / "serve.sh").read_text(), "serve.sh")
    texts = [word.text for word in words if word.text != "$@"]
    parser = AsyncEngineArgs.add_cli_args(FlexibleArgumentParser())
    parser.parse_args(["--model", *texts[texts.index("serve") + 1 :]])


def verl(folder: Path) -> None:
    from hydra import compose, initialize_config_dir

    with initialize_config_dir(str(folder.resolve()), version_base=None):
        read = compose("verl_sft")
    own = yaml.safe_load((folder / "verl_sft.yaml").read_text())
    assert read.model.path == own["model"]["path"]


def skypilot(folder: Path) -> None:
    import sky

    task = sky.Task.from_yaml(str(folder / "sky.yaml"))
    assert task.num_nodes >= 1


# target -> [(package that has the parser, parser)]
PARSERS = {
    "trl": [("accelerate", accelerate), ("trl", trl)],
    "torchtitan": [("torchtitan", torchtitan)],
    "megatron": [("megatron.training", megatron)],
    "vllm": [("vllm", vllm)],
    "verl": [("verl", verl)],
    "skypilot": [("sky", skypilot)],
}


def installed():
    """(target, parser) of what is installed here."""
    return [
        (target, parser)
        for target, parsers in PARSERS.items()
        for package, parser in parsers
        if _is_here(package)
    ]


def _is_here(package: str) -> bool:
    try:
        return find_spec(package) is not None
    except ModuleNotFoundError:
        return False

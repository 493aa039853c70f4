"""Keys of a GGUF file from its head."""

import struct

import pytest

from phalanx.errors import JobError
from phalanx.models.file_head import demo_tokenizer_folder, head_keys


def text(value):
    content = value.encode()
    return struct.pack("<Q", len(content)) + content


def gguf(*keys, version=3, magic=b"GGUF"):
    body = b"".join(text(name) + struct.pack("<I", kind) + value for name, kind, value in keys)
    return magic + struct.pack("<IQQ", version, 7, len(keys)) + body


KEYS = (
    ("name", 8, text("tiny")),
    ("layers", 4, struct.pack("<I", 3)),
    ("scale", 6, struct.pack("<f", 0.5)),
    ("flag", 7, b"\x01"),
    ("tokens", 9, struct.pack("<IQ", 8, 3) + text("a") + text("") + text("\u2581b")),
    ("kinds", 9, struct.pack("<IQ3i", 5, 3, 1, 2, -3)),
)


def read(tmp_path, content):
    path = tmp_path / "m.gguf"
    path.write_bytes(content)
    return head_keys(path)


def test_all_kinds_of_values_are_read(tmp_path):
    assert read(tmp_path, gguf(*KEYS)) == {
        "name": "tiny", "layers": 3, "scale": 0.5, "flag": True, "tokens": ["a", "", "\u2581b"],
        "kinds": [1, 2, -3],
    }  # fmt: skip


def test_tensors_behind_the_keys_need_not_be_there(tmp_path):
    assert read(tmp_path, gguf(*KEYS) + b"\0" * 100)["layers"] == 3


@pytest.mark.parametrize("cut", [3, 7, 15, 23, 40, 60, -1, -20])
def test_a_head_that_is_cut_off_is_refused(tmp_path, cut):
    with pytest.raises(JobError, match="no GGUF file"):
        read(tmp_path, gguf(*KEYS)[:cut])


@pytest.mark.parametrize(
    "content",
    [
        b"",
        gguf(*KEYS, magic=b"GGML"),
        gguf(*KEYS, version=2),
        gguf(("x", 99, b"")),
        gguf(("x", 9, struct.pack("<IQ", 99, 1))),
        gguf(("x", 9, struct.pack("<IQ", 4, 2**63))),
        gguf(("x", 9, struct.pack("<IQ", 8, 2**40))),
        gguf(("x", 8, struct.pack("<Q", 2**62))),
    ],
)
def test_other_files_are_refused(tmp_path, content):
    with pytest.raises(JobError):
        read(tmp_path, content)


@pytest.mark.demo
def test_the_demo_s_tokenizer_is_that_of_its_whole_model():
    from phalanx.models.demo import ensure_demo_model

    folder = demo_tokenizer_folder()
    whole = ensure_demo_model()
    for name in ("tokenizer.json", "tokenizer_config.json"):
        assert (folder / name).read_bytes() == (whole / name).read_bytes()

"""Slices, files and manifest without processes: any mesh writes, any other reads, bit for bit."""

from __future__ import annotations

import json
from itertools import product
from pathlib import Path
from tempfile import TemporaryDirectory

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from safetensors.torch import load_file

from phalanx.engines.checkpoint.manifest import (
    Manifest,
    StoredFile,
    StoredSlice,
    StoredTensor,
)
from phalanx.engines.checkpoint.reader import read_slices
from phalanx.engines.checkpoint.shard_file import DTYPES, write_shard
from phalanx.engines.checkpoint.slices import Slice, cut, require_whole, writers
from phalanx.engines.checkpoint.snapshot import PIECE_BYTES, Values
from phalanx.engines.checkpoint.state import Entry
from phalanx.errors import JobError, PlanError

shapes = st.lists(st.integers(0, 7), max_size=3).map(tuple)
meshes = st.lists(st.integers(1, 4), min_size=1, max_size=2)


def slices_of(shape, layout):
    """By rank."""
    mesh, cuts = layout
    places = list(product(*map(range, mesh)))
    return [
        cut(shape, [(dim, mesh[at], place[at]) for at, dim in cuts if dim is not None])
        for place in places
    ]


def take(whole, held):
    return whole[held.within(Slice((0,) * whole.dim(), tuple(whole.shape)))]


def written(folder, tensors, held):
    """Every rank's file; what the manifest would say of the tensors."""
    num_bytes = {name: whole.element_size() for name, whole in tensors.items()}
    slices = {name: [] for name in tensors}
    for rank, names in enumerate(writers(held, num_bytes)):
        mine = {name: take(tensors[name], held[rank][name]).contiguous() for name in sorted(names)}
        offsets = {name: held[rank][name].offset for name in names}
        for name in names:
            slices[name].append(StoredSlice(str(rank), *held[rank][name]))
        write_shard(folder / str(rank), Values(mine), mine, offsets)
    return {
        name: StoredTensor(tuple(tensors[name].shape), "", tuple(found))
        for name, found in slices.items()
    }


@st.composite
def cases(draw):
    num_tensors = draw(st.integers(1, 3))
    source, target = draw(meshes), draw(meshes)
    tensors = {}
    for at in range(num_tensors):
        shape = draw(shapes)
        dtype = draw(st.sampled_from([torch.float32, torch.bfloat16, torch.float64]))
        dims = st.none() if not shape else st.none() | st.integers(0, len(shape) - 1)
        cuts = [
            (mesh, [(d, draw(dims)) for d in draw(st.permutations(range(len(mesh))))])
            for mesh in (source, target)
        ]
        tensors[f"tensor.{at}"] = (shape, dtype, *cuts)
    return tensors


@settings(max_examples=150, deadline=None)
@given(cases())
def test_what_one_mesh_writes_another_reads_bit_for_bit(case):
    wholes = {
        name: torch.randn(shape, dtype=torch.float64).to(dtype)
        for name, (shape, dtype, *_) in case.items()
    }

    def by_rank(which):
        found = {name: slices_of(wholes[name].shape, given[which]) for name, given in case.items()}
        num_ranks = len(next(iter(found.values())))
        return [{name: each[rank] for name, each in found.items()} for rank in range(num_ranks)]

    sources, targets = by_rank(2), by_rank(3)
    with TemporaryDirectory() as name:
        folder = Path(name)
        stored = written(folder, wholes, sources)
        for name, whole in wholes.items():
            require_whole(
                name, whole.shape, [Slice(s.offset, s.shape) for s in stored[name].slices]
            )
        for held in targets:
            entries = {
                name: Entry("weights", torch.full(each.shape, -1.0, dtype=wholes[name].dtype), each)
                for name, each in held.items()
            }
            read_slices(folder, entries, stored)
            for name, entry in entries.items():
                assert torch.equal(entry.local, take(wholes[name], entry.held))


@given(st.integers(1, 40), st.integers(1, 8))
def test_replicas_share_the_bytes(num_tensors, num_ranks):
    held = [{f"t{at}": Slice((0,), (10,)) for at in range(num_tensors)} for _ in range(num_ranks)]
    shares = writers(held, {f"t{at}": 4 for at in range(num_tensors)})
    assert sorted(name for share in shares for name in share) == sorted(held[0])
    assert max(map(len, shares)) - min(map(len, shares)) <= 1


@pytest.mark.parametrize(
    "slices",
    [
        [Slice((0, 0), (2, 3))],  # a row is missing
        [Slice((0, 0), (2, 3)), Slice((1, 0), (1, 3))],  # as many elements, one row twice
        [Slice((0, 0), (3, 3)), Slice((2, 2), (1, 1))],
    ],
)
def test_slices_with_gaps_or_doubles_are_refused(slices):
    with pytest.raises(PlanError, match="are not the whole tensor"):
        require_whole("name", (3, 3), slices)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_safetensors_reads_what_is_written(tmp_path, dtype):
    tensors = {
        "model.scalar": torch.tensor(3).to(dtype),
        "model.empty": torch.empty(0, 4, dtype=dtype),
        "model.matrix": (torch.arange(35).view(5, 7) % 13).to(dtype),
        'quo"ted \u00e4': torch.tensor([1, 0]).to(dtype),
    }
    record = write_shard(
        tmp_path / "file", Values(tensors), tensors, {n: (0,) * t.dim() for n, t in tensors.items()}
    )
    again = load_file(tmp_path / "file")
    assert again.keys() == tensors.keys()
    for name, tensor in tensors.items():
        assert again[name].dtype == dtype and torch.equal(again[name], tensor)
    assert record.num_bytes == (tmp_path / "file").stat().st_size
    header = (tmp_path / "file").read_bytes()
    size = int.from_bytes(header[:8], "little")
    table = json.loads(header[8 : 8 + size])["__metadata__"]
    assert json.loads(table["DCP_SHARDING_INFO"])["model.matrix"] == {"saved_offsets": [0, 0]}


def test_a_file_is_never_written_over(tmp_path):
    (tmp_path / "file").write_bytes(b"mine")
    with pytest.raises(FileExistsError):
        write_shard(tmp_path / "file", Values({}), [], {})
    assert (tmp_path / "file").read_bytes() == b"mine"


def test_a_snapshot_keeps_its_moment_while_the_tensors_change():
    tensors = {
        "long": torch.arange(PIECE_BYTES // 2, dtype=torch.float32),  # two pieces
        "cut": torch.arange(24.0).view(4, 6)[:, 1:3],
        "scalar": torch.tensor(5.0),
    }
    expected = {n: each.contiguous().reshape(-1).view(torch.uint8) for n, each in tensors.items()}
    expected = {name: each.numpy().tobytes() for name, each in expected.items()}
    values, found = Values(tensors), {name: b"" for name in tensors}

    def change():
        values.detach()
        for each in tensors.values():
            each.fill_(-1.0)

    def sink(piece):
        found["long"] += bytes(piece)

    sink(values._next_piece("long"))
    change()  # between two pieces
    values.read("long", sink)
    change()
    for name in ("cut", "scalar"):
        values.read(
            name, lambda piece, name=name: found.__setitem__(name, found[name] + bytes(piece))
        )
    assert found == expected


def test_memory_that_a_device_is_still_filling_is_not_copied_before_it_is_full():
    pinned, found = torch.zeros(3), []
    values = Values({"pinned": pinned}, is_own=True)
    values.detach()  # the next update comes while copies are under way
    pinned.fill_(7.0)
    values.read("pinned", lambda piece: found.append(bytes(piece)))
    assert found == [torch.full((3,), 7.0).numpy().tobytes()]


@settings(max_examples=200, deadline=None)
@given(st.data())
def test_a_manifest_that_was_touched_is_refused_or_says_the_same(data):
    slices = (StoredSlice("weights-0", (0,), (3,)),)
    tensors = {"model.w": StoredTensor((3,), "float32", slices)}
    files = {"weights-0": StoredFile(12, "ab" * 32)}
    manifest = Manifest("key", {"shard": 2}, {"step": 3}, tensors, files, {"a": {"b": [1]}})
    with TemporaryDirectory() as name:
        manifest.save(Path(name))
        file = Path(name) / "manifest.json"
        content = bytearray(file.read_bytes())
        at = data.draw(st.integers(0, len(content) - 1))
        content[at : at + data.draw(st.integers(0, 3))] = data.draw(st.binary(max_size=3))
        file.write_bytes(content)
        try:
            again = Manifest.load(name)
        except JobError as error:
            assert error.code in ("checkpoint/damaged", "checkpoint/format")
        else:
            assert again.tensors == tensors and again.files == files
            assert (again.job_key, again.progress, again.mesh) == ("key", {"step": 3}, {"shard": 2})

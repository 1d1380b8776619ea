"""Safetensors written in parts by several writers, checksums, and PyTorch's older files."""

import json
import os
import pickle

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from safetensors.torch import load_file

from megatron_grpo.utils.errors import GrpoError
from megatron_grpo.weights.safetensors_files import (
    PytorchBin,
    Safetensors,
    SafetensorsWriter,
    check_checksums,
    plan_files,
    save_tensors,
    write_checksums,
    write_index,
)

DTYPES = [torch.float32, torch.bfloat16, torch.float16, torch.float64]


def write(directory, tensors, max_bytes, writers=1, parts=1):
    """Write tensors in turns by several writers, each in so many parts along the first axis."""
    files = plan_files({name: (tuple(t.shape), t.dtype) for name, t in tensors.items()}, max_bytes)
    pens = [SafetensorsWriter(directory, files) for _ in range(writers)]
    pens[0].create()
    pieces = [(name, i, part) for name, t in tensors.items() for i, part in enumerate(t.chunk(parts))]
    for turn, (name, i, part) in enumerate(reversed(pieces)):
        pens[turn % writers].write(name, part, i, parts)
    sums = {}
    for pen in pens:
        pen.close()
        for name, found in pen.checksums.items():
            sums.setdefault(name, {}).update(found)
    write_index(directory, files)
    write_checksums(directory, sums)
    return files


@given(st.data())
@settings(max_examples=60, deadline=None)
def test_any_writers_make_the_same_files(tmp_path_factory, data):
    parts = data.draw(st.integers(1, 3))
    tensors = {
        f"tensor {i}": torch.randn(parts * data.draw(st.integers(1, 4)), data.draw(st.integers(1, 3))).to(
            data.draw(st.sampled_from(DTYPES))
        )
        for i in range(data.draw(st.integers(1, 6)))
    }
    limit = data.draw(st.integers(1, 300))
    one, many = tmp_path_factory.mktemp("one"), tmp_path_factory.mktemp("many")
    files = write(one, tensors, limit)
    write(many, tensors, limit, writers=data.draw(st.integers(1, 4)), parts=parts)
    read = {}
    for file in files:
        assert (one / file.name).read_bytes() == (many / file.name).read_bytes()
        read |= load_file(many / file.name)  # the format's own reader
        size = sum(t.numel() * t.element_size() for t in load_file(many / file.name).values())
        assert size <= limit or len(file.places) == 1
    assert read.keys() == tensors.keys()
    assert all(torch.equal(read[name], t) and read[name].dtype == t.dtype for name, t in tensors.items())
    for directory in (one, many):
        source = Safetensors(directory)
        assert set(source.names()) == tensors.keys() and check_checksums(source) == len(tensors)
        assert all(source.dtype(name) == t.dtype and source.shape(name) == t.shape for name, t in tensors.items())


@pytest.fixture
def written(tmp_path):
    tensors = {"a": torch.randn(4, 6), "b": torch.randn(5).bfloat16(), "experts": torch.randn(3, 2)}
    write(tmp_path, tensors, max_bytes=100, parts=1)
    return tmp_path, tensors


def test_a_flipped_bit_is_found_and_named(written):
    directory, _ = written
    path = directory / json.loads((directory / "model.safetensors.index.json").read_text())["weight_map"]["b"]
    content = bytearray(path.read_bytes())
    offset = next(place[0] for file in plan_of(written) for name, place in file.places.items() if name == "b")
    content[offset] ^= 1
    path.write_bytes(content)
    with pytest.raises(GrpoError, match=r"the bytes of tensor b are not those that were written"):
        check_checksums(Safetensors(directory))


def plan_of(written):
    return plan_files({name: (tuple(t.shape), t.dtype) for name, t in written[1].items()}, 100)


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("{", "holds no checksums"),
        ('{"crc32": {"a": ["x"]}}', "holds no checksums"),
        ('{"crc32": {"c": ["00000000"]}}', "names the tensor c, which .* does not hold"),
    ],
)
def test_checksums_that_are_none(written, text, message):
    directory, _ = written
    (directory / "checksums.json").write_text(text)
    with pytest.raises(GrpoError, match=message):
        check_checksums(Safetensors(directory))


def test_a_short_write_is_an_error(written, monkeypatch):
    """A tensor of another size than planned must never reach the file."""
    directory, tensors = written
    pen = SafetensorsWriter(directory, plan_of(written))
    with pytest.raises(AssertionError, match="48 bytes x 1, but 96 were planned"):
        pen.write("a", tensors["a"][:2])

    def full(*arguments):
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(os, "pwrite", full)
    with pytest.raises(OSError, match="No space left"):
        pen.write("a", tensors["a"])
    pen.close()


class TestPytorchBin:
    def test_is_read_like_safetensors(self, tmp_path):
        tensors = {"a": torch.randn(4, 6), "b": torch.randn(5).bfloat16()}
        torch.save(tensors, tmp_path / "pytorch_model.bin")
        source = PytorchBin(tmp_path)
        assert list(source.names()) == ["a", "b"]
        assert torch.equal(source.read("a", (slice(1, 3), slice(None))), tensors["a"][1:3])
        assert (source.shape("b"), source.dtype("b")) == ((5,), torch.bfloat16)

    def test_shards(self, tmp_path):
        torch.save({"a": torch.ones(2)}, tmp_path / "pytorch_model-00001-of-00002.bin")
        weight_map = {"a": "pytorch_model-00001-of-00002.bin", "b": "pytorch_model-00002-of-00002.bin"}
        (tmp_path / "pytorch_model.bin.index.json").write_text(json.dumps({"weight_map": weight_map}))
        source = PytorchBin(tmp_path)
        assert torch.equal(source.read("a"), torch.ones(2))
        with pytest.raises(GrpoError, match=r"pytorch_model-00002-of-00002\.bin does not exist .needed for tensor b"):
            source.read("b")

    def test_code_is_not_run(self, tmp_path):
        class Evil:
            def __reduce__(self):
                return os.mkdir, (str(tmp_path / "evil"),)

        torch.save({"a": Evil()}, tmp_path / "pytorch_model.bin")
        with pytest.raises(GrpoError, match=r"pytorch_model\.bin holds more than tensors"):
            PytorchBin(tmp_path)
        (tmp_path / "pytorch_model.bin").write_bytes(pickle.dumps(Evil()))
        with pytest.raises(GrpoError, match=r"pytorch_model\.bin holds more than tensors"):
            PytorchBin(tmp_path)
        assert not (tmp_path / "evil").exists()

    @pytest.mark.parametrize("keep", [0, 10, 400])
    def test_truncated(self, tmp_path, keep):
        torch.save({"a": torch.randn(100)}, tmp_path / "pytorch_model.bin")
        content = (tmp_path / "pytorch_model.bin").read_bytes()
        (tmp_path / "pytorch_model.bin").write_bytes(content[:keep])
        with pytest.raises(GrpoError, match=r"pytorch_model\.bin holds more than tensors, is truncated"):
            PytorchBin(tmp_path)

    def test_other_content(self, tmp_path):
        torch.save([torch.ones(2)], tmp_path / "pytorch_model.bin")
        with pytest.raises(GrpoError, match="holds a list, not a dictionary"):
            PytorchBin(tmp_path)
        torch.save({"a": 3}, tmp_path / "pytorch_model.bin")
        with pytest.raises(GrpoError, match="does not hold the tensor a"):
            PytorchBin(tmp_path).read("a")
        torch.save({"a": torch.ones(2, dtype=torch.int8)}, tmp_path / "pytorch_model.bin")
        with pytest.raises(GrpoError, match=r"tensor a has dtype torch\.int8"):
            PytorchBin(tmp_path).dtype("a")

    def test_none_there(self, tmp_path):
        with pytest.raises(GrpoError, match=r"holds neither pytorch_model\.bin nor pytorch_model\.bin\.index\.json"):
            PytorchBin(tmp_path)


def test_other_users_may_read_a_file_if_the_umask_lets_them(tmp_path):
    before = os.umask(0o022)
    try:
        save_tensors({"a": torch.zeros(2)}, tmp_path / "a", {"format": "pt"})
    finally:
        os.umask(before)
    assert (tmp_path / "a").stat().st_mode & 0o777 == 0o644


def test_one_export_at_a_time(tmp_path):
    first, second = (SafetensorsWriter(tmp_path / "out", []) for _ in range(2))
    first.claim()
    (tmp_path / "out" / "shard").touch()
    with pytest.raises(GrpoError, match=r"another export is writing \S*out: wait for its end"):
        second.claim()
    second.discard()
    assert (tmp_path / "out" / "shard").exists()
    first.release()  # or its process was killed
    second.claim()
    assert not any((tmp_path / "out").iterdir())
    second.discard()
    assert not (tmp_path / "out").exists()

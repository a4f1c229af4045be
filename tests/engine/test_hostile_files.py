"""Checkpoints and info files that try to run code, to change the process, or to lead numpy astray."""

import argparse
import io
import os
import pathlib
import pickle
import struct
import time
import zipfile
from collections import OrderedDict

import numpy as np
import pytest
import torch
from mmengine.logging import HistoryBuffer
from numpy.testing import assert_array_equal, assert_equal

from visdet import restricted_load
from visdet.datasets import load_infos
from visdet.engine import CheckpointError, read_checkpoint
from visdet.engine.errors import DamagedCheckpointError


def text(value: str) -> bytes:
    return b"X" + struct.pack("<I", len(value.encode())) + value.encode()


def named(module: str, name: str) -> bytes:
    return f"c{module}\n{name}\n".encode()


def number(value: int) -> bytes:
    return b"J" + struct.pack("<i", value)


def tuple_of(*items: bytes) -> bytes:
    return b"(" + b"".join(items) + b"t"


def call(function: bytes, *arguments: bytes) -> bytes:
    return function + tuple_of(*arguments) + b"R"


def raw(content: bytes) -> bytes:
    return call(named("_codecs", "encode"), text(content.decode("latin1")), text("latin1"))


def dtype(code: str, *fields: bytes) -> bytes:
    state = tuple_of(number(3), text("<"), *(fields or (b"N",) * 3), number(-1), number(-1), number(0))
    return call(named("numpy", "dtype"), text(code), b"\x89", b"\x88") + state + b"b"


def array(kind: bytes, shape: bytes, content: bytes) -> bytes:
    made = call(named("numpy.core.multiarray", "_reconstruct"), named("numpy", "ndarray"), b")", raw(b"b"))
    return made + tuple_of(number(1), shape, kind, b"\x89", content) + b"b"


def state_of(target: bytes, **state: int) -> bytes:
    items = b"".join(text(key) + number(value) + b"s" for key, value in state.items())
    return target + tuple_of(b"N", b"}" + items) + b"b"


ONE, EIGHT = tuple_of(number(1)), raw(b"A" * 8)
NUMPY = {
    "hidden object": array(
        dtype("f8", b"N", tuple_of(text("a")), b"}" + text("a") + tuple_of(dtype("O8"), number(0)) + b"s"),
        ONE,
        EIGHT,
    ),
    "subarray of objects": array(dtype("f8", tuple_of(dtype("O8"), ONE), b"N", b"N"), ONE, EIGHT),
    "bytes as objects": array(dtype("O8"), ONE, EIGHT),
    "structure": array(dtype("f8,O"), ONE, raw(b"A" * 16)),
    "other size": array(dtype("f8"), tuple_of(number(9)), EIGHT),
    "negative size": array(dtype("f8"), tuple_of(number(-1), number(-1)), EIGHT),
    "huge size": array(dtype("f8"), tuple_of(*[number(2**31 - 1)] * 5), EIGHT),
    "no content": call(named("numpy.core.multiarray", "_reconstruct")),
    "buffer of objects": call(
        named("numpy._core.numeric", "_frombuffer"), EIGHT, dtype("O8"), ONE, text("C")
    ),
    "state of a class": state_of(named("numpy", "dtype"), finish=1),
    "state of a function": state_of(named("numpy.core.multiarray", "scalar"), __defaults__=1),
    "times": dtype("M8", *[b"N"] * 3, number(1)),
    "huge bytes": b"\x8e" + struct.pack("<Q", 1 << 40),
    "deep lists": b"]" * 20_000 + b"a" * 19_999,
}
OTHERS = {
    "system": call(named("posix", "system"), text("touch ran")),
    "eval": call(named("builtins", "eval"), text("open('ran', 'w')")),
    "state of a rebuild": state_of(named("torch._utils", "_rebuild_tensor_v2"), __defaults__=1),
    "state of a path": state_of(named("pathlib", "PosixPath"), name=1),
    "state of one path": state_of(call(named("pathlib", "PosixPath"), text("a")), name=1),
    "state of Namespace": state_of(named("argparse", "Namespace"), lr=1),
    "state of HistoryBuffer": state_of(
        named("mmengine.logging.history_buffer", "HistoryBuffer"), max_length=1
    ),
    "history of nothing": named("mmengine.logging.history_buffer", "HistoryBuffer") + b")\x81",
    "attribute of a dict": state_of(call(named("collections", "OrderedDict")), items=1),
    "huge storage": call(named("torch.storage", "UntypedStorage"), b"\x8a\x06\0\0\0\0\0\x7f"),
}


HOSTILE = {**NUMPY, **OTHERS}


def process_state() -> list:
    functions = (torch._utils._rebuild_tensor_v2, *restricted_load._SAFE_GLOBALS.values())
    classes = (pathlib.PurePosixPath, argparse.Namespace, HistoryBuffer, restricted_load._DType)
    return [
        [getattr(function, "__defaults__", None) for function in functions],
        [dict(vars(kind)) for kind in classes],
        {known for known in torch.serialization.get_safe_globals() if isinstance(known, tuple)},
    ]


def checkpoint_of(content: bytes, path: pathlib.Path, zipped: bool) -> None:
    """Write a checkpoint {"state_dict": content} around the pickled content."""
    content = b"\x80\x02}" + text("state_dict") + content + b"s."
    whole = io.BytesIO()
    torch.save({}, whole, _use_new_zipfile_serialization=zipped)
    whole.seek(0)
    if not zipped:
        for _ in range(3):
            pickle.load(whole)
        path.write_bytes(whole.getvalue()[: whole.tell()] + content + b"\x80\x02].")
        return
    with zipfile.ZipFile(whole) as source, zipfile.ZipFile(path, "w") as changed:
        for part in source.namelist():
            changed.writestr(part, content if part.endswith("data.pkl") else source.read(part))


@pytest.mark.parametrize("form", ["zip", "legacy", "infos"])
@pytest.mark.parametrize("name", HOSTILE)
def test_hostile_files(tmp_path, monkeypatch, name, form):
    monkeypatch.chdir(tmp_path)
    before, content = process_state(), HOSTILE[name]
    if form == "infos":
        (tmp_path / "hostile.pkl").write_bytes(b"\x80\x02}" + text("infos") + content + b"s.")
        with pytest.raises(ValueError, match=r"info file hostile\.pkl "):
            load_infos("hostile.pkl")
    else:
        checkpoint_of(content, tmp_path / "hostile.pth", form == "zip")
        with pytest.raises(CheckpointError, match=r"hostile\.pth"):
            read_checkpoint("hostile.pth")
    assert process_state() == before and not (tmp_path / "ran").exists()


@pytest.mark.parametrize(
    ("content", "told"),
    [
        (b"", "it is empty"),
        (b"\0" * 3000, "it holds only zeros"),
        (b"version https://git-lfs.github.com/spec/v1\noid sha256:00\n", "a pointer of Git LFS"),
        (b"<!DOCTYPE html><html>404</html>", "a web page"),
        (b"\xff\xd8\xff\xe0\0\x10JFIF", "it is a picture"),
        (b"\x08\x0a\x12\x07pytorch", "it is a graph like ONNX"),
        (b"import visdet", "it is text like Python"),
    ],
    ids=["empty", "zeros", "lfs", "html", "jpeg", "onnx", "python"],
)
def test_files_of_another_kind_are_named(tmp_path, content, told):
    for name, read in (("a.pth", read_checkpoint), ("a.pkl", load_infos)):
        (tmp_path / name).write_bytes(content)
        with pytest.raises((DamagedCheckpointError, ValueError), match=told):
            read(tmp_path / name)


def shared(depth, kind):
    """Return a container that holds one other twice, and so on, to a depth."""
    made = "a"
    for _ in range(depth):
        made = kind((made, made)) if kind in (list, tuple) else kind(a=made, b=made)
    return made


@pytest.mark.parametrize("kind", [list, tuple, dict, argparse.Namespace])
@pytest.mark.parametrize("depth", [20, 200])
def test_parts_that_are_shared_take_no_time(tmp_path, kind, depth):
    """A walk through all of them would take 2 ** depth steps. What is beyond all data is refused."""
    torch.save({"state_dict": {"w": torch.ones(2)}, "meta": shared(depth, kind)}, tmp_path / "a.pth")
    (tmp_path / "a.pkl").write_bytes(pickle.dumps({"infos": [shared(depth, list)], "metadata": {}}))
    assert os.path.getsize(tmp_path / "a.pkl") < 4000
    start = time.perf_counter()
    if depth == 20:
        assert isinstance(read_checkpoint(tmp_path / "a.pth")["meta"], kind)
        assert len(load_infos(tmp_path / "a.pkl")[0]) == 1
    else:
        for name, read in (("a.pth", read_checkpoint), ("a.pkl", load_infos)):
            with pytest.raises(
                (DamagedCheckpointError, ValueError), match=rf"{name} .*share parts.* over 1000000000"
            ):
                read(tmp_path / name)
    assert time.perf_counter() - start < 5


def test_a_container_that_holds_itself_is_refused(tmp_path):
    made = []
    made.append({"a": made})
    torch.save({"w": torch.ones(2), "meta": made}, tmp_path / "a.pth")
    with pytest.raises(DamagedCheckpointError, match="one of its containers holds itself"):
        read_checkpoint(tmp_path / "a.pth")


def test_lists_in_an_array_of_objects_are_no_further_axes(tmp_path):
    made = np.empty(2, object)
    made[:] = [[1, 2], [3, 4]], shared(25, list)
    (tmp_path / "a.pkl").write_bytes(pickle.dumps({"infos": [made], "metadata": {}}))
    (found,) = load_infos(tmp_path / "a.pkl")[0]
    assert found.shape == (2,) and found[0] == [[1, 2], [3, 4]]


def test_an_archive_that_claims_more_than_it_has(tmp_path):
    with zipfile.ZipFile(tmp_path / "bomb.pth", "w", zipfile.ZIP_DEFLATED) as archive:
        archive.writestr("bomb/data.pkl", b"\0" * 10_000_000)
    with pytest.raises(DamagedCheckpointError, match="larger than the file"):
        read_checkpoint(tmp_path / "bomb.pth")


ARRAYS = [
    np.arange(6.0).reshape(2, 3),
    np.arange(6, dtype=">i4").reshape(2, 3).T,
    np.array(["a", "bcd"]),
    np.array([b"a", b"bcd"]),
    np.array([True, False]),
    np.array([1 + 2j]),
    np.zeros((0, 3), np.float16),
    np.array(["car", None, [1, 2]], dtype=object),
    np.float32(0.5),
    np.str_("x"),
    np.bool_(True),
]


@pytest.mark.parametrize("protocol", range(2, 6))
def test_arrays_and_scalars_are_read_as_they_were(tmp_path, protocol):
    content = {"infos": ARRAYS, "metadata": {"array": ARRAYS[0]}}
    (tmp_path / "a.pkl").write_bytes(pickle.dumps(content, protocol))
    infos, metadata = load_infos(tmp_path / "a.pkl")
    for found, expected in zip([*infos, metadata["array"]], [*ARRAYS, ARRAYS[0]], strict=True):
        assert_equal(found, expected)
        assert type(found) is type(expected) and found.dtype == expected.dtype
        assert found.flags.writeable == expected.flags.writeable


def test_a_checkpoint_of_another_repository(tmp_path):
    """What the repositories of DETR and mmengine save beside tensors."""
    args = argparse.Namespace(lr=1e-4, folder=pathlib.Path("a"), nested=[np.float64(2)])
    content = {"model": {"w": torch.ones(2)}, "args": args, "arrays": (ARRAYS[0], [ARRAYS[2]])}
    content["meta"] = OrderedDict(history=HistoryBuffer([1.0, 3.0], [1, 1]), path=pathlib.Path("a/b"))
    torch.save(content, tmp_path / "detr.pth")
    registered = [np.dtype, (np.ndarray, "numpy.ndarray")]  # a way around that many projects use
    with torch.serialization.safe_globals(registered):
        before = set(torch.serialization.get_safe_globals())
        found = read_checkpoint(tmp_path / "detr.pth")
        assert set(torch.serialization.get_safe_globals()) >= before
    assert found["args"].lr == 1e-4 and found["args"].nested == [2.0]
    assert found["meta"]["history"].mean() == 2.0 and str(found["meta"]["path"]) == "a/b"
    assert_array_equal(found["arrays"][0], ARRAYS[0])
    assert_array_equal(found["arrays"][1][0], ARRAYS[2])

"""Programs for older versions of numpy, torch, torchvision and shapely, written small, under the bridge."""

import argparse
import importlib
import sys
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest
import torch
from programs import run_python

from visdet.compat import older_versions


@pytest.fixture
def bridge():
    with older_versions.installed():
        yield older_versions


DROPPED = {
    "numpy": lambda m: (
        (m.int, m.float, m.object, m.float_) == (int, float, object, np.float64)
        and (m.Inf, m.product([2, 3])) == (np.inf, 6)
        and m.in1d([[1, 2]], [2]).tolist() == [False, True]
        and m.bool(1)
        and issubclass(m.VisibleDeprecationWarning, Warning)
    ),
    "collections": lambda m: issubclass(list, m.Sequence) and issubclass(dict, m.Mapping),
    "inspect": lambda m: m.getargspec(lambda a, *others, b=1, **named: 0) == (["a"], "others", "named", None),
    "pkgutil": lambda m: m.find_loader("numpy") and m.find_loader("no_such_module") is None,
    "PIL.Image": lambda m: (m.ANTIALIAS, m.LINEAR, m.CUBIC) == (m.LANCZOS, m.BILINEAR, m.BICUBIC),
    "PIL.ImageDraw": lambda m: m.Draw(m.Image.new("RGB", (9, 9))).textsize("car") > (9, 4),
    "torch.nn.parallel._functions": lambda m: {m._get_stream(d) for d in (-1, torch.device("cpu"))} == {None},
    "matplotlib.cm": lambda m: m.get_cmap("jet", 5).N == 5 and m.get_cmap("jet").name == "jet",
}


@pytest.mark.parametrize("module", DROPPED)
def test_names_that_newer_versions_have_dropped(bridge, module):
    assert DROPPED[module](pytest.importorskip(module))


@pytest.mark.filterwarnings("ignore::DeprecationWarning")
def test_all_names_that_numpy_2_has_dropped(bridge):
    expired = pytest.importorskip("numpy._expired_attrs_2_0", reason="needs numpy 2")
    assert [name for name in expired.__expired_attributes__ if not hasattr(np, name)] == []


# What numpy 1.23.5 says.
OF_NUMPY_1 = {
    "[t.__name__ for t in np.sctypes['int']]": ["int8", "int16", "int32", "int64"],
    "[t.__name__ for t in np.sctypes['others']]": ["bool", "object", "bytes", "str", "void"],
    "np.cast['f'](1.7) == np.float32(1.7)": True,
    "np.cast[np.uint8]([1, 2]).dtype.name": "uint8",
    "np.nbytes['d'], np.nbytes[np.float32]": (8, 4),
    "np.obj2sctype(np.zeros(2)) is np.float64, np.obj2sctype('i4') is np.int32": (True, True),
    "np.issctype(np.int32), np.issctype(1.1), np.issctype(np.dtype(object))": (True, False, False),
    "np.maximum_sctype(np.uint8) is np.uint64, np.maximum_sctype('S') is np.bytes_": (True, True),
    "np.sctype2char(np.int32), np.sctype2char(float)": ("i", "d"),
    "np.find_common_type([np.float32], [np.int64, np.float64]).name": "float32",
    "np.find_common_type(['f4', 'i4'], ['c8']).name": "complex128",
    "np.find_common_type([], [np.int64, np.float32, complex]).name": "complex128",
    "np.issubsctype('S8', str), np.issubsctype(np.array([1]), int)": (False, True),
    "np.asfarray([1], np.int32).dtype.name, np.asfarray([1], 'f4').dtype.name": ("float64", "float32"),
    "np.geterrobj(), np.seterrobj([8192, 1171, None]), np.geterr()['invalid']": (
        [8192, 521, None],
        None,
        "raise",
    ),
    "np.seterrobj([8192, 521, None]), np.geterr()['under']": (None, "ignore"),
    "np.recfromcsv(['A,b', '1,2', '3,4.5'], encoding='utf8').b.tolist()": [2.0, 4.5],
    "np.take([1, 2, 3], 5, mode=np.CLIP), np.safe_eval('[1]'), np.math.pi > 3": (3, [1], True),
    "np.deprecate(message='m')(max)(1, 2), np.deprecate_with_doc('x')(max)(1, 2)": (2, 2),
    "np.get_array_wrap(1), np.fastCopyAndTranspose([[1, 2]]).tolist()": (None, [[1], [2]]),
}


@pytest.mark.filterwarnings("ignore::DeprecationWarning")
@pytest.mark.parametrize("expression", OF_NUMPY_1)
def test_names_mean_what_they_meant(bridge, expression):
    assert eval(expression, {"np": np}) == OF_NUMPY_1[expression]


def test_uninstall_leaves_the_packages_as_they_were():
    parallel = torch.nn.parallel
    before = vars(np).copy(), torch.load, parallel._functions._get_stream
    with older_versions.installed():
        assert torch.load is not before[1]
    assert vars(np) == before[0] and torch.load is before[1] and parallel._functions._get_stream is before[2]
    assert not hasattr(parallel.DistributedDataParallel, "_use_replicated_tensor_module")


def test_uninstall_restores_names_that_were_imported_from_patched_modules():
    code = (
        "from visdet.compat import find\nbridge = find('older_versions')\nbridge.watch()\nimport torch\n"
        "wrapped = torch.load\nassert wrapped is torch.serialization.load and wrapped.__wrapped__\n"
        "bridge.uninstall()\nassert torch.load is torch.serialization.load is wrapped.__wrapped__\n"
    )
    run_python("-c", code)


def test_styles_of_seaborn_have_their_old_names(bridge):
    style = pytest.importorskip("matplotlib.style")
    style.use(["seaborn-whitegrid", "seaborn-v0_8-white", "default"])
    with pytest.raises(OSError, match="no-style"):
        style.use("no-style")


def test_an_existing_name_is_kept(bridge):
    assert np.bool is np.bool_ and "bool" not in bridge.patched()["numpy"]


CONTENT = {
    "args": argparse.Namespace(lr=1e-4, out=Path("a")),
    "score": np.float64(0.5),
    "meta": {"PALETTE": [np.array([1, 2])], "names": np.array(["car"], object)},
}


def test_checkpoints_with_other_types_are_read(bridge, tmp_path):
    torch.save({"model": {"w": torch.ones(2)}, **CONTENT}, tmp_path / "a.pth")
    read = torch.load(tmp_path / "a.pth", map_location="cpu")
    assert read["args"].lr == 1e-4 and read["meta"]["names"].tolist() == ["car"]


class Runs:
    def __reduce__(self):
        return print, ("this file runs code",)


def test_a_checkpoint_runs_no_code_and_other_calls_of_load_are_as_before(
    bridge, tmp_path, stdout, monkeypatch
):
    torch.save(Runs(), tmp_path / "a.pth")
    torch.save(CONTENT["score"], tmp_path / "b.pth")
    for path, options in (("a.pth", {}), ("b.pth", {"weights_only": True})):
        with pytest.raises(Exception, match="Weights only load failed"):
            torch.load(tmp_path / path, **options)
    assert not stdout()
    torch.load(tmp_path / "a.pth", weights_only=False)
    monkeypatch.setenv("TORCH_FORCE_NO_WEIGHTS_ONLY_LOAD", "1")
    torch.load(tmp_path / "a.pth")
    assert stdout().count("this file runs code") == 2


@pytest.mark.parametrize("known, given", [("--local_rank", "--local-rank"), ("--local-rank", "--local_rank")])
def test_either_spelling_of_the_local_rank(bridge, known, given):
    parser = argparse.ArgumentParser()
    parser.add_argument(known, type=int)
    parser.add_argument("config")
    assert parser.parse_args([f"{given}=3", "c.py"]).local_rank == 3
    assert parser.parse_args([given, "3", "c.py"]) == parser.parse_args([known, "3", "c.py"])


def test_a_parser_with_both_spellings_is_left_alone(bridge):
    parser = argparse.ArgumentParser()
    parser.add_argument("--local_rank", type=int)
    parser.add_argument("--local-rank", type=int, dest="other")
    assert vars(parser.parse_args(["--local-rank", "3"])) == {"local_rank": None, "other": 3}


def test_the_argument_of_the_launcher_reaches_the_script(tmp_path):
    script = tmp_path / "train.py"
    script.write_text(
        "import argparse\np = argparse.ArgumentParser()\np.add_argument('--local_rank', type=int)\n"
        "p.add_argument('config')\nprint(p.parse_args())\n"
    )
    command = ["-m", "visdet.compat", "--local-rank=3", "run", "--only", "older_versions"]
    out, _ = run_python(*command, script, "c.py")
    assert out.strip() == "Namespace(local_rank=3, config='c.py')"


def test_torchvision_taken_for_an_old_one(bridge):
    pytest.importorskip("torchvision")
    from torchvision.ops import _new_empty_tensor
    from torchvision.ops.misc import _NewEmptyTensorOp, _output_size

    x = torch.zeros(0, 3, 4, 6, requires_grad=True)
    shape = [*x.shape[:-2], *_output_size(2, x, None, 0.5)]
    for function in (_new_empty_tensor, _NewEmptyTensorOp.apply):
        assert function(x, shape).shape == (0, 3, 2, 3)
        assert torch.autograd.grad(function(x, shape).sum(), x)[0].shape == x.shape
    assert _output_size(2, x, (5, 7), None) == [5, 7] and _output_size(2, x, None, (2, 3)) == [8, 18]


def test_transforms_with_the_methods_of_earlier_versions(bridge):
    v2 = pytest.importorskip("torchvision.transforms.v2")

    class Scale(v2.Transform):
        def _get_params(self, flat_inputs):
            return {"factor": len(flat_inputs) + 1}

        def _transform(self, inpt, params):
            return inpt * params["factor"]

    assert Scale()(torch.ones(1), 4) == (2, 4)
    assert torch.equal(v2.RandomHorizontalFlip(1)(torch.arange(2)[None]), torch.tensor([[1, 0]]))
    with pytest.raises(NotImplementedError):
        v2.Transform()(torch.ones(1))


def test_a_config_is_formatted_by_a_yapf_without_verify(bridge):
    yapf = pytest.importorskip("yapf.yapflib.yapf_api", reason="pip install yapf")
    assert yapf.FormatCode("a   = 1", style_config="pep8", verify=True)[0] == "a = 1\n"


@pytest.mark.cuda
def test_streams_of_a_gpu_copy_as_mmcv_does(bridge):
    get_stream = torch.nn.parallel._functions._get_stream
    stream = get_stream(0)
    assert stream is get_stream(0)
    with torch.cuda.device(0), torch.cuda.stream(stream):
        copy = torch.arange(9).cuda(0, non_blocking=True)
    torch.cuda.current_stream().wait_stream(stream)
    copy.record_stream(torch.cuda.current_stream())
    assert copy.tolist() == list(range(9))


EXTRACTOR = """
import numpy as np
from shapely.geometry import box
from shapely import strtree
from shapely.strtree import STRtree

def touching(boxes):
    index = {{{key}: i for i, b in enumerate(boxes)}}
    trees = strtree.STRtree(boxes), STRtree(boxes)
    return [[[index[id(o)] if {by_id} else o for o in tree.query(b)] for b in boxes] for tree in trees]

def chosen(boxes):
    return STRtree(boxes).query(boxes[0], predicate="intersects")
"""


@pytest.mark.parametrize("by_id", [True, False])
def test_a_tree_of_shapely_1_beside_mmcv_1(bridge, by_id, tmp_path, monkeypatch):
    geometry = pytest.importorskip("shapely.geometry", reason="pip install shapely")
    monkeypatch.setitem(sys.modules, "mmcv", SimpleNamespace(__version__="1.7.2" if by_id else "2.1.0"))
    source = EXTRACTOR.format(key="id(b)" if by_id else "i", by_id=by_id)
    (tmp_path / "a_map_extractor.py").write_text(source if by_id else source.replace("index[id(o)]", "o"))
    monkeypatch.syspath_prepend(str(tmp_path))
    monkeypatch.delitem(sys.modules, "a_map_extractor", raising=False)
    extractor = importlib.import_module("a_map_extractor")
    boxes = [geometry.box(0, 0, 2, 2), geometry.box(1, 1, 3, 3), geometry.box(9, 9, 10, 10)]
    for found in extractor.touching(boxes):
        assert [sorted(int(i) for i in row) for row in found] == [[0, 1], [0, 1], [2]]
    assert sorted(extractor.chosen(boxes).tolist()) == [0, 1]
    del sys.modules["a_map_extractor"]


DDP = """
import torch, os
os.environ.update(MASTER_ADDR="127.0.0.1", MASTER_PORT="0", RANK="0", WORLD_SIZE="1")
torch.distributed.init_process_group("gloo", store=torch.distributed.HashStore(), rank=0, world_size=1)

class Wrapper(torch.nn.parallel.DistributedDataParallel):
    def _run_ddp_forward(self, *inputs, **kwargs):
        module = self._replicated_tensor_module if self._use_replicated_tensor_module else self.module
        return module(*inputs, **kwargs)
    def train_step(self, x):
        if self.require_forward_param_sync:
            self._sync_params()
        return self.module(x)

net = Wrapper(torch.nn.BatchNorm1d(3))
net.train_step(torch.rand(4, 3))
print(net.eval()(torch.rand(4, 3)).shape)
"""


def test_distributed_wrappers_of_mmcv_1(tmp_path):
    (tmp_path / "a.py").write_text(DDP)
    out, _ = run_python("-m", "visdet.compat", "run", "--only", "older_versions", tmp_path / "a.py")
    assert out.strip() == "torch.Size([4, 3])"

"""The bridge to programs that were written for older versions of Python, numpy, torch and other packages.

It gives modules of today the names that newer versions have dropped. A name that exists is not replaced, but for these
functions, which then accept more than before:

* ``torch.load`` without ``weights_only`` also reads numpy's arrays and scalars, mmengine's history buffers,
  ``argparse.Namespace`` and paths, without running code from the file.
* ``torch.nn.parallel._functions._get_stream`` also takes the index of a GPU.
* ``argparse`` reads ``--local-rank``, which ``torch.distributed.launch`` passes, as ``--local_rank`` and vice versa,
  in programs that know one of them.
* ``matplotlib.style.use`` knows the styles of seaborn by their names of before matplotlib 3.6.
* ``FormatCode`` of yapf ignores ``verify``, which configs of mmcv up to 1.7.0 pass.
* ``STRtree.query`` of shapely returns geometries in modules that look up their ``id``, as with shapely 1.
"""

import functools
import importlib.util
import inspect
import os
import re
import sys
from collections import namedtuple
from collections.abc import Callable, Iterator, Sequence
from types import ModuleType
from typing import Any, NamedTuple

from ._bridge import Bridge

__all__ = ["install", "installed", "patched", "uninstall"]

_READS_ALL = ("1", "y", "yes", "true")  # the values of TORCH_FORCE_NO_WEIGHTS_ONLY_LOAD
_MAPS = r"[^.]*(?:map|chamfer|dataset)[^.]*"  # the names of modules that may hold map elements in a tree


def _sync_params(self: Any) -> None:
    """Do what torch's wrapper did up to torch 1.10, for the ``MMDistributedDataParallel`` of mmcv 1.x."""
    if self._check_sync_bufs_pre_fwd():
        self._sync_buffers()


def _run_ddp_forward(self: Any, *inputs: Any, **kwargs: Any) -> Any:
    """Do what mmcv's wrapper does from mmcv 1.6 on, because torch 1.12 no longer calls ``to_kwargs``."""
    if not self.device_ids:
        return self.module(*inputs, **kwargs)
    moved, named = self.to_kwargs(inputs, kwargs, self.device_ids[0])
    return self.module(*moved[0], **named[0])


def _new_empty_tensor(x: Any, shape: Sequence[int]) -> Any:
    return x.new_zeros(shape) + x.sum() * 0


def _output_size(dim: int, input: Any, size: Any, scale_factor: Any) -> list[int]:
    given = scale_factor if size is None else size
    given = [given] * dim if isinstance(given, int | float) else list(given)
    return given if size is not None else [int(input.shape[i - dim] * given[i]) for i in range(dim)]


_ArgSpec = namedtuple("_ArgSpec", "args varargs keywords defaults")
# Functions for empty batches, which programs import that take torchvision 0.10 and later for 0.1.
_TORCHVISION = {
    "_new_empty_tensor": _new_empty_tensor,
    "_output_size": _output_size,
    "_NewEmptyTensorOp": type("_NewEmptyTensorOp", (), {"apply": staticmethod(_new_empty_tensor)}),
}


def _of_numpy(numpy: Any) -> dict[str, Any]:
    from .numpy_names import names

    return names()


def _of_collections(collections: Any) -> dict[str, Any]:
    abc = collections.abc
    return {name: getattr(abc, name) for name in abc.__all__}


def _getargspec(function: Any) -> _ArgSpec:
    return _ArgSpec(*inspect.getfullargspec(function)[:4])


def _find_loader(name: str) -> Any:
    return getattr(importlib.util.find_spec(name), "loader", None)


def _get_cmap(*given: Any, **named: Any) -> Any:
    return importlib.import_module("matplotlib.pyplot").get_cmap(*given, **named)


def _of_images(image: Any) -> dict[str, Any]:
    return {"ANTIALIAS": image.LANCZOS, "LINEAR": image.BILINEAR, "CUBIC": image.BICUBIC}


def _textsize(self: Any, *text: Any, **named: Any) -> Any:
    return self.textbbox((0, 0), *text, **named)[2:]


def _getsize(self: Any, *text: Any, **named: Any) -> Any:
    return self.getbbox(*text, **named)[2:]


class _Added(NamedTuple):
    """Names that a module lacks, or a class in it, if ``owner`` names one. A function returns those of a module."""

    names: dict[str, Any] | Callable[[Any], dict[str, Any]]
    owner: str = ""


class _Widened(NamedTuple):
    """A function of a module, or of the class that ``owner`` names, and what makes the new function of it."""

    name: str
    widen: Callable[[Callable], Callable]
    owner: str = ""


def _reading_more(load: Callable) -> Callable:
    @functools.wraps(load)
    def load_more(
        f: Any,
        map_location: Any = None,
        pickle_module: Any = None,
        *,
        weights_only: Any = None,
        **options: Any,
    ) -> Any:
        reads_all = os.environ.get("TORCH_FORCE_NO_WEIGHTS_ONLY_LOAD", "0") in _READS_ALL
        if reads_all or weights_only is not None or pickle_module is not None:
            return load(f, map_location, pickle_module, weights_only=weights_only, **options)
        from visdet.restricted_load import load_restricted

        return load_restricted(f, load, map_location=map_location, **options)

    return load_more


def _taking_an_index(get_stream: Callable) -> Callable:
    import torch

    @functools.cache
    def stream_of(index: int) -> Any:
        return None if index < 0 else torch.cuda.Stream(index)

    @functools.wraps(get_stream)
    def get_stream_of(device: Any) -> Any:
        return stream_of(device) if isinstance(device, int) else get_stream(device)

    return get_stream_of


def _reading_either_rank(parse: Callable) -> Callable:
    @functools.wraps(parse)
    def parse_known_args(self: Any, args: Any = None, namespace: Any = None) -> Any:
        args = list(sys.argv[1:] if args is None else args)
        known = [name for name in ("--local_rank", "--local-rank") if name in self._option_string_actions]
        if len(known) == 1:
            args = [re.sub("^--local[_-]rank(?==|$)", known[0], a) if isinstance(a, str) else a for a in args]
        return parse(self, args, namespace)

    return parse_known_args


def _ignoring_verify(format_code: Callable) -> Callable:
    if "verify" in inspect.signature(format_code).parameters:
        return format_code

    @functools.wraps(format_code)
    def format_code_of_old(*arguments: Any, verify: Any = None, **options: Any) -> Any:
        return format_code(*arguments, **options)

    return format_code_of_old


def _knowing_old_styles(use: Callable) -> Callable:
    """Return ``matplotlib.style.use`` for names of before matplotlib 3.6, such as "seaborn-white"."""

    def current(style: Any) -> Any:
        return re.sub("^seaborn(?!-v)", "seaborn-v0_8", style) if isinstance(style, str) else style

    @functools.wraps(use)
    def use_style(style: Any) -> None:
        use(list(map(current, style)) if isinstance(style, list | tuple) else current(style))

    return use_style


def _preferring(earlier_name: str) -> Callable[[Callable], Callable]:
    """Return what widens a method, so that a class with the method of an earlier version gets that one called."""

    def widen(method: Callable) -> Callable:
        @functools.wraps(method)
        def call(self: Any, *arguments: Any) -> Any:
            earlier = getattr(self, earlier_name, None)
            return method(self, *arguments) if earlier is None else earlier(*arguments)

        return call

    return widen


_CHANGED: dict[str, _Added | _Widened] = {
    "collections": _Added(_of_collections),
    "inspect": _Added({"getargspec": _getargspec}),
    "pkgutil": _Added({"find_loader": _find_loader}),
    "matplotlib.cm": _Added({"get_cmap": _get_cmap}),
    "PIL.Image": _Added(_of_images),
    "PIL.ImageDraw": _Added({"textsize": _textsize}, "ImageDraw"),
    "PIL.ImageFont": _Added({"getsize": _getsize}, "FreeTypeFont"),
    "numpy": _Added(_of_numpy),
    "torch.nn.parallel.distributed": _Added(
        {"_use_replicated_tensor_module": False, "_sync_params": _sync_params}, "DistributedDataParallel"
    ),
    "mmcv.parallel.distributed": _Added({"_run_ddp_forward": _run_ddp_forward}, "MMDistributedDataParallel"),
    "torchvision.ops": _Added(_TORCHVISION),
    "torchvision.ops.misc": _Added(_TORCHVISION),
    "torch": _Widened("load", _reading_more),
    "torch.serialization": _Widened("load", _reading_more),
    "torch.nn.parallel._functions": _Widened("_get_stream", _taking_an_index),
    "mmcv.parallel._functions": _Widened("_get_stream", _taking_an_index),
    "yapf.yapflib.yapf_api": _Widened("FormatCode", _ignoring_verify),
    "matplotlib.style": _Widened("use", _knowing_old_styles),
    "matplotlib.style.core": _Widened("use", _knowing_old_styles),
    # Transforms that programs derive for torchvision up to 0.20. Each module has the class Transform.
    "torchvision.transforms.v2": _Widened("make_params", _preferring("_get_params"), "Transform"),
    "torchvision.transforms.v2._transform": _Widened("transform", _preferring("_transform"), "Transform"),
    "argparse": _Widened("parse_known_args", _reading_either_rank, "ArgumentParser"),
}


_originals: dict[Callable, Callable] = {}  # by the functions that replace them


def _returning_geometries(STRtree: type) -> type:
    class GeometrySTRtree(STRtree):  # type: ignore[misc, valid-type]
        """A tree whose ``query`` returns the geometries themselves, as in shapely 1."""

        def query(self, geometry: Any, *arguments: Any, **named: Any) -> Any:
            found = super().query(geometry, *arguments, **named)
            return found if arguments or named else list(self.geometries.take(found))

    return GeometrySTRtree


def _map_elements(module: ModuleType) -> dict[str, Any]:
    """Return a module's names of shapely's tree with the tree of shapely 1, if the program has mmcv 1.x.

    Repositories on mmcv 1.x were written for shapely 1. Others take the indices that shapely 2 returns.
    """
    shapely = sys.modules.get("shapely.strtree")
    has_mmcv_1 = getattr(sys.modules.get("mmcv"), "__version__", "").startswith("1.")
    if not has_mmcv_1 or shapely is None or not hasattr(shapely.STRtree, "geometries"):
        return {}
    own = vars(module)
    tree = _returning_geometries(shapely.STRtree)
    names: dict[str, Any] = {}
    if own.get("STRtree") is shapely.STRtree:
        names["STRtree"] = tree
    if own.get("strtree") is shapely:
        names["strtree"] = ModuleType("shapely.strtree")
        vars(names["strtree"]).update(vars(shapely), STRtree=tree)
    return names


def _patch(module: ModuleType, bridge: Bridge) -> Iterator[str]:
    owner: Any = module
    names: dict[str, Any] = {}
    match _CHANGED.get(module.__name__):
        case None:
            names = _map_elements(module)
        case _Added(added, class_name):
            owner = getattr(module, class_name) if class_name else module
            names = added(module) if callable(added) else added
            names = {key: names[key] for key in names.keys() - vars(owner).keys()}
        case _Widened(name, widen, class_name):
            owner = getattr(module, class_name) if class_name else module
            function = vars(owner).get(name)
            if function in _originals:  # It was imported from a module that is patched.
                bridge.at_uninstall(functools.partial(setattr, owner, name, _originals[function]))
            elif function is not None:
                names[name] = widen(function)
                _originals[names[name]] = function
    for key, value in names.items():
        bridge.replace(owner, key, value)
        yield key


_MODULES = "|".join(map(re.escape, _CHANGED))


class _OlderVersions(Bridge):
    def patch_module(self, module: ModuleType) -> None:
        """Patch a module without torch, which a program may not need, or which may be importing the module itself."""
        if reached := list(self._patch(module, self)):
            self.reached[module.__name__] = reached


bridge = _OlderVersions("older_versions", "torch", rf"{_MODULES}|(?:.*\.)?{_MAPS}", _patch)
install, uninstall, installed, patched = bridge.functions

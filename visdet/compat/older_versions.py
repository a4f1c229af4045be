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

import collections.abc
import functools
import importlib.util
import inspect
import os
import re
import sys
from collections import namedtuple
from collections.abc import Callable, Iterator, Sequence
from types import ModuleType
from typing import Any

from ._bridge import Bridge

__all__ = ["install", "installed", "patched", "uninstall"]

_NUMPY_NAMES = {
    "bool_": "bool bool8",
    "float64": "float_",
    "complex64": "singlecomplex",
    "complex128": "complex_ cfloat",
    "longdouble": "longfloat",
    "clongdouble": "longcomplex clongfloat",
    "str_": "unicode_ str0",
    "bytes_": "string_ bytes0",
    "object_": "object0",
    "void": "void0",
    "intp": "int0",
    "uintp": "uint0",
    "inf": "Inf Infinity infty PINF",
    "nan": "NaN NAN",
    "prod": "product",
    "cumprod": "cumproduct",
    "all": "alltrue",
    "any": "sometrue",
    "round": "round_",
    "vstack": "row_stack",
    "trapezoid": "trapz",
    "asmatrix": "mat",
}
_NUMPY_ERRORS = (
    "AxisError",
    "ComplexWarning",
    "ModuleDeprecationWarning",
    "TooHardError",
    "VisibleDeprecationWarning",
)
_READS_ALL = ("1", "y", "yes", "true")  # the values of TORCH_FORCE_NO_WEIGHTS_ONLY_LOAD
_MAPS = re.compile(r"map|chamfer|dataset")  # in the names of modules that may hold map elements in a tree


def _numpy(np: Any) -> dict[str, Any]:
    """Return the names that numpy 1.24, 2.0 and later versions have dropped."""
    names = {
        old: getattr(np, new)
        for new, olds in _NUMPY_NAMES.items()
        if hasattr(np, new)
        for old in olds.split()
    }
    names |= {"int": int, "float": float, "complex": complex, "object": object, "str": str, "unicode": str}
    names |= {"NINF": -np.inf, "PZERO": 0.0, "NZERO": -0.0, "long": int, "issubclass_": issubclass}
    errors = getattr(np, "exceptions", None)
    names |= {name: getattr(errors, name) for name in _NUMPY_ERRORS if hasattr(errors, name)}
    return names | {
        "asscalar": lambda a: a.item(),
        "asfarray": lambda a, dtype=np.float64: np.asarray(a, dtype),
        "msort": lambda a: np.sort(a, axis=0),
        "in1d": lambda ar1, ar2, **options: np.isin(np.ravel(ar1), ar2, **options),
    }


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
# By the name of a module: the attribute of it that lacks names, or "" for the module itself, and what they are, of the
# module.
_ADDED: dict[str, tuple[str, Callable[[Any], dict[str, Any]]]] = {
    "collections": (
        "",
        lambda _: {name: getattr(collections.abc, name) for name in collections.abc.__all__},
    ),
    "inspect": (
        "",
        lambda _: {"getargspec": lambda function: _ArgSpec(*inspect.getfullargspec(function)[:4])},
    ),
    "pkgutil": (
        "",
        lambda _: {"find_loader": lambda name: getattr(importlib.util.find_spec(name), "loader", None)},
    ),
    "matplotlib.cm": (
        "",
        lambda _: {
            "get_cmap": lambda *given, **named: importlib.import_module("matplotlib.pyplot").get_cmap(
                *given, **named
            )
        },
    ),
    "PIL.Image": (
        "",
        lambda image: {"ANTIALIAS": image.LANCZOS, "LINEAR": image.BILINEAR, "CUBIC": image.BICUBIC},
    ),
    "PIL.ImageDraw": (
        "ImageDraw",
        lambda _: {"textsize": lambda self, *text, **named: self.textbbox((0, 0), *text, **named)[2:]},
    ),
    "PIL.ImageFont": (
        "FreeTypeFont",
        lambda _: {"getsize": lambda self, *text, **named: self.getbbox(*text, **named)[2:]},
    ),
    "numpy": ("", _numpy),
    "torch.nn.parallel.distributed": (
        "DistributedDataParallel",
        lambda _: {"_use_replicated_tensor_module": False, "_sync_params": _sync_params},
    ),
    "mmcv.parallel.distributed": (
        "MMDistributedDataParallel",
        lambda _: {"_run_ddp_forward": _run_ddp_forward},
    ),
    "torchvision.ops": ("", lambda _: _TORCHVISION),
    "torchvision.ops.misc": ("", lambda _: _TORCHVISION),
}


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
        use([*map(current, style)] if isinstance(style, list | tuple) else current(style))

    return use_style


# By the name of a module: the attribute that holds a function, its name, and what makes the new function of it.
_WIDENED: dict[str, tuple[str, str, Callable[[Callable], Callable]]] = {
    "torch": ("", "load", _reading_more),
    "torch.serialization": ("", "load", _reading_more),
    "torch.nn.parallel._functions": ("", "_get_stream", _taking_an_index),
    "mmcv.parallel._functions": ("", "_get_stream", _taking_an_index),
    "yapf.yapflib.yapf_api": ("", "FormatCode", _ignoring_verify),
    "matplotlib.style": ("", "use", _knowing_old_styles),
    "matplotlib.style.core": ("", "use", _knowing_old_styles),
    "argparse": ("ArgumentParser", "parse_known_args", _reading_either_rank),
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
    if not str(getattr(sys.modules.get("mmcv"), "__version__", "")).startswith("1."):
        return {}
    found = {name: value for name, value in vars(module).items() if name in ("STRtree", "strtree")}
    if shapely is None or not found or not hasattr(shapely.STRtree, "geometries"):
        return {}
    tree = _returning_geometries(shapely.STRtree)
    names: dict[str, Any] = {}
    if found.get("STRtree") is shapely.STRtree:
        names["STRtree"] = tree
    if found.get("strtree") is shapely:
        names["strtree"] = ModuleType("shapely.strtree")
        vars(names["strtree"]).update(vars(shapely), STRtree=tree)
    return names


def _patch(module: ModuleType, bridge: Bridge) -> Iterator[str]:
    name = module.__name__
    if name in _ADDED:
        attribute, names = _ADDED[name]
        owner = getattr(module, attribute) if attribute else module
        for key, value in names(module).items():
            if key not in vars(owner):
                bridge.replace(owner, key, value)
                yield key
    elif name in _WIDENED:
        attribute, key, widen = _WIDENED[name]
        owner = getattr(module, attribute) if attribute else module
        function = vars(owner).get(key)
        if function in _originals:  # It was imported from a module that is patched.
            bridge.at_uninstall(functools.partial(setattr, owner, key, _originals[function]))
        elif function is not None:
            widened = widen(function)
            _originals[widened] = function
            bridge.replace(owner, key, widened)
            yield key
    else:
        for key, value in _map_elements(module).items():
            bridge.replace(module, key, value)
            yield key


class _OlderVersions(Bridge):
    def patch_module(self, module: ModuleType) -> None:
        """Patch a module without importing torch, as a program that needs numpy alone may run."""
        if reached := list(self._patch(module, self)):
            self.reached[module.__name__] = reached


bridge = _OlderVersions(
    "older_versions",
    "torch",
    lambda name: name in _ADDED or name in _WIDENED or bool(_MAPS.search(name.rpartition(".")[2])),
    _patch,
)
install, uninstall, installed = bridge.install, bridge.uninstall, bridge.installed
patched = bridge.patched

"""Every private name of another package that visdet or a tool uses, with its reason; and no reading of foreign code."""

import ast
import inspect
import re
import textwrap
from collections.abc import Iterator
from functools import cache
from importlib import import_module

import pytest
import torch
from programs import ROOT

FILES = [path for folder in ("visdet", "tools") for path in sorted((ROOT / folder).rglob("*.py"))]
PRIVATE = re.compile(r"_[A-Za-z]\w*")
# Names of these are no other package's.
NOT_FOREIGN = {"visdet", "builtins", "abc", "typing", "enum"}
LOOK_UPS = {"getattr", "hasattr", "setattr", "delattr", "replace"}  # ``replace`` is that of a bridge
# A foreign function is recognised by its name and by comparing results, never by its bytecode or its source.
READERS = {"__code__", "co_code", "co_consts", "co_name", "co_names", "dis", "getsource", "getsourcelines"}

# Why each name is used, from its first private part on.
REASONS = {
    # torch
    "_C._AutoDispatchBelowAutograd": "An autograd.Function calls an operator that has an autograd kernel of its own.",
    "_C._TorchDispatchModeKey": "It names the modes whose tensors have no numbers.",
    "_C._are_functorch_transforms_active": "Under torch.func, operators keep to what its transforms see through.",
    "_C._dispatch_has_kernel_for_dispatch_key": "Whether an operator has a kernel is asked without calling it.",
    "_C._error_if_any_worker_fails": "A broken pipe to a data worker gets the cause of the worker's death.",
    "_C._get_dispatch_mode": "Tables made under a mode whose tensors have no numbers are not kept.",
    "_apply": "A module has no public place to learn the type to which its model is cast.",
    "_assert_async": "Indices are checked without the host waiting for the GPU.",
    "_backward_hooks": "A module has no public list of its hooks. A fused call may skip only a module without hooks.",
    "_backward_pre_hooks": "See _backward_hooks.",
    "_forward_hooks": "See _backward_hooks.",
    "_has_any_global_hook": "See _backward_hooks.",
    "_forward_pre_hooks": "See _backward_hooks.",
    "_BatchNorm": "mmengine's initialisers find a layer by the names of its bases, and configs name this one.",
    "_InstanceNorm": "It is the common base of the instance norms.",
    "_base": "A tensor has no public name for the tensor of which it is a part.",
    "_conv_forward": "torch names it for subclasses that compute a convolution's weight.",
    "_current_level": "Forward-mode derivatives need plain torch.",
    "_dynamo": "What torch cannot export or compile is an error of a class there.",
    "_buffers": "A search for the tensors of a model by public functions takes milliseconds.",
    "_parameters": "A search for the tensors of a model by public functions takes milliseconds.",
    "_foreach_add_": "Many tensors are added by few kernels.",
    "_foreach_copy_": "Many tensors are copied by few kernels.",
    "_addmm_activation": "The kernel of a product computes the ReLU after it.",
    "_foreach_lerp_": "Many averages are moved by few kernels.",
    "_foreach_zero_": "Many tensors become zero by few kernels.",
    "_lazy_graph_module._use_lazy_graph_module": "torch would write the Python of a graph again for each part of it.",
    "_meta_registrations": "Older torch takes a model of any size for one of either even or odd sizes.",
    "_new_shared": "A batch is written to shared memory at once, as torch's own collation does it.",
    "_foreach_norm": "The norms of many tensors take few kernels.",
    "_iterator": "The workers of a loader end with its iterator.",
    "_inductor": "torch documents the functions of AOTInductor there.",
    "_load_from_state_dict": "torch names it for subclasses that read older checkpoints.",
    "_metadata": "A state dict has the versions of its modules there.",
    "_unsafe_view": "The output of an autograd.Function may be changed in place only if it is no view.",
    "_optimizer_step_post_hooks": "See _optimizer_step_pre_hooks.",
    "_optimizer_step_pre_hooks": "A graph of an update would not call the hooks of its step, which torch lists there.",
    "_post_accumulate_grad_hooks": "A graph adds gradients only of parameters without hooks, which torch lists there.",
    "_op": "Whoever calls an operator gets torch's own error where memory does not suffice.",
    "_python_dispatch.TorchDispatchMode": "It is documented, but has no public module.",
    "_python_dispatch._disable_current_modes": "Examples are computed outside the mode in which a package is imported.",
    "_schema": "The CUDA library declares its operators by the schemas of the CPU library.",
    "_step_supports_amp_scaling": "A GradScaler hides infinite gradients from an optimizer that has it.",
    "_to_copy": "Autocast casts a parameter by this operator, which a graph does for all of them at once.",
    "_utils.ExceptionWrapper": "torch's loader raises an error of a worker only if it comes in this class.",
    "_version": "torch documents it: the version of a module's state dict.",
    # mmengine
    "_timestamp": "mmengine leaves the time at which a run begins there.",
    "_vis_backends": "A visualizer has no public list of its backends, of which one needs another name of a picture.",
    "_ParamScheduler": "mmengine exports it as the base of all schedules.",
    "_after_iter": "mmengine calls it after a batch of every stage.",
    "_before_epoch": "See _after_iter.",
    "_before_iter": "See _after_iter.",
    "_accumulative_counts": "The report says how many iterations make a step.",
    "_cfg_dict": "A config's keys are looked at without ``Config``'s own attributes.",
    "_get_default_store": "The main process asks the store of the group whether the others save a checkpoint, too.",
    "_dynamo.callback.callback_handler": "torch.compile tells nobody else that a part is compiled.",
    "_dict_to_config_dict": "A config file is read as mmengine reads it, but by a parser that names its mistakes.",
    "_merge_a_into_b": "See _dict_to_config_dict.",
    "_parse_scope": "See _dict_to_config_dict.",
    "_substitute_base_vars": "See _dict_to_config_dict.",
    "_clip_grad": "The norm stays on the device until it is logged.",
    "_dataset_meta": "The metric reads its file when it gets the classes.",
    "_lock": "mmengine leaves the lock of its registries locked where a constructor fails.",
    "_is_owned": "See _lock.",
    "_dump_init_info": "mmengine would log two lines for each parameter.",
    "_fully_initialized": "A drawn data set is drawn before its first use.",
    "_get_ori_dataset_idx": "A wrapper of data sets does not say otherwise whose pipeline reads an image.",
    "_get_unserialized_subset": "The images that are left are checked before they are serialized.",
    "_indices": "See _get_unserialized_subset.",
    "_indices_of_rank": "All processes plan the batches of all, and an endless sampler is made for one.",
    "_initialize_fig": "The first figure imports matplotlib, which takes long.",
    "_inner_count": "``inner_count`` cannot be set.",
    "_load_metainfo": "Classes come from the annotation file, too.",
    "_locations": "The modules are imported until one has the name.",
    "_non_blocking": "Samples are copied as the images are.",
    "_rand_another": "Another image is drawn by torch's generator.",
    "_save_best_checkpoint": "The old best file goes after the new one is written.",
    "_save_checkpoint_with_step": "Old files go after the new one is written.",
    "_serialize_data": "See _get_unserialized_subset.",
    # Python and other packages
    "_C": "The extension of groundingdino has this name, which users import.",
    "_fields": "Python documents it for named tuples.",
    "_replace": "Python documents it for named tuples.",
    "_on_queue_feeder_error": "multiprocessing calls it for an object that cannot be sent.",
    "_vendor.tomli": "Python 3.10 has no tomllib, and the tool runs before anything is installed.",
}
# Where a public name would be, with a pattern of it. There is none in torch 2.10 to 2.14.
NOT_YET_PUBLIC = {
    "_C._AutoDispatchBelowAutograd": ("torch.library", "below_autograd"),
    "_C._TorchDispatchModeKey": ("torch.utils._python_dispatch", "ModeKey$"),
    "_C._are_functorch_transforms_active": ("torch.func", "active"),
    "_C._dispatch_has_kernel_for_dispatch_key": ("torch.library", "has_kernel"),
    "_C._get_dispatch_mode": ("torch.utils._python_dispatch", "^get_.*mode"),
    "_backward_hooks": ("torch.nn.modules.module", "^(get|has|list)_.*hook"),
    "_current_level": ("torch.autograd.forward_ad", "^(is_|current)"),
    "_foreach_copy_": ("torch", "^foreach_copy"),
    "_foreach_norm": ("torch", "^foreach_norm"),
    "_python_dispatch.TorchDispatchMode": ("torch.utils", "TorchDispatchMode"),
}


def own_names(tree: ast.AST) -> Iterator[str]:
    """Yield the names that a file defines: functions, classes, variables, arguments and attributes of ``self``."""
    for node in ast.walk(tree):
        if isinstance(node, ast.FunctionDef | ast.ClassDef):
            yield node.name
        elif isinstance(node, ast.Name) and isinstance(node.ctx, ast.Store):
            yield node.id
        elif isinstance(node, ast.arg):
            yield node.arg
        elif isinstance(node, ast.Attribute) and isinstance(node.ctx, ast.Store) and is_own(node):
            yield node.attr


def is_own(node: ast.Attribute) -> bool:
    """Return whether an attribute is read or set on the object itself, where ``inherited`` looks for its owner."""
    return ast.unparse(node.value) in ("self", "cls", "super()", "ctx")


def private_tail(name: str) -> str | None:
    """Return a dotted name from its first private part on, or None if it has none."""
    parts = name.split(".")
    starts = [i for i, part in enumerate(parts) if PRIVATE.fullmatch(part)]
    return ".".join(parts[starts[0] :]) if starts else None


def taken_from_others(tree: ast.AST, own: set[str]) -> Iterator[tuple[str, int]]:
    """Yield the private names that a file imports or reads from another package, with their lines."""
    of_modules = vars(torch.nn.Module())
    for node in ast.walk(tree):
        names = []
        if isinstance(node, ast.Import):
            names = [alias.name for alias in node.names]
        elif isinstance(node, ast.ImportFrom) and node.level == 0:
            names = [f"{node.module}.{alias.name}" for alias in node.names]
        elif isinstance(node, ast.Attribute) and PRIVATE.fullmatch(node.attr) and not is_own(node):
            text = ast.unparse(node)
            names = (
                [text] if node.attr not in own or node.attr in of_modules or text.startswith("torch.") else []
            )
        elif isinstance(node, ast.Constant) and node.value in of_modules:
            names = [node.value]
        elif isinstance(node, ast.Call) and ast.unparse(node.func).split(".")[-1] in LOOK_UPS:
            names = [argument.value for argument in node.args[1:2] if isinstance(argument, ast.Constant)]
            names = [name for name in names if name not in own]
        tails = [
            private_tail(name) for name in names if isinstance(name, str) and not name.startswith("visdet")
        ]
        yield from ((tail, node.lineno) for tail in tails if tail is not None)


@cache
def private_names(cls: type) -> set[str]:
    """Return the private names that a class defines, and those that its code reads or sets on ``self``."""
    try:
        tree = ast.parse(textwrap.dedent(inspect.getsource(cls)))
    except (OSError, TypeError):  # The class is written in C.
        return set(vars(cls))
    names = {node.attr for node in ast.walk(tree) if isinstance(node, ast.Attribute) and is_own(node)}
    names |= {node.name for node in ast.walk(tree) if isinstance(node, ast.FunctionDef)}
    assigned = [node for node in tree.body[0].body if isinstance(node, ast.Assign | ast.AnnAssign)]
    return names.union(*(own_names(node) for node in assigned))


def inherited() -> Iterator[tuple[str, str]]:
    """Yield the private names that a class of visdet shares with a base class of another package, with the class."""
    names_of = {path: ".".join(path.relative_to(ROOT).with_suffix("").parts) for path in FILES}
    for module in names_of.values():
        if not module.startswith("visdet.") or re.search(r"__(main|init)__$|\bstartup\b", module):
            continue
        for cls in vars(import_module(module)).values():
            if not inspect.isclass(cls) or cls.__module__ != module:
                continue
            bases = [base for base in cls.__mro__ if base.__module__.split(".")[0] not in NOT_FOREIGN]
            names = private_names(cls) & set().union(*map(private_names, bases))
            yield from ((name, f"{module}.{cls.__name__}") for name in names if PRIVATE.fullmatch(name))


@pytest.fixture(scope="module")
def uses():
    """Return the places of each private name that is used."""
    trees = {path: ast.parse(path.read_text()) for path in FILES}
    own = {path.stem for path in FILES}.union(*map(own_names, trees.values()))
    places: dict[str, list[str]] = {}
    for path, tree in trees.items():
        for name, line in taken_from_others(tree, own):
            places.setdefault(name, []).append(f"{path.relative_to(ROOT)}:{line}")
    for name, cls in inherited():
        places.setdefault(name, []).append(cls)
    return places


def test_each_private_name_has_a_reason(uses):
    unknown = {name: places for name, places in uses.items() if name not in REASONS}
    assert not unknown, "use a public name, or add the name to REASONS"


def test_no_reason_is_left_over(uses):
    assert not set(REASONS) - set(uses)


@pytest.mark.parametrize("name", NOT_YET_PUBLIC)
def test_there_is_no_public_name_yet(name):
    assert name in REASONS
    module, pattern = NOT_YET_PUBLIC[name]
    public = [other for other in dir(import_module(module)) if other[0] != "_" and re.search(pattern, other)]
    assert not public, f"torch {torch.__version__} may have a public name for {name}"


def words(tree: ast.AST) -> Iterator[str]:
    """Yield the names, attributes, strings and imported names of a file."""
    for node in ast.walk(tree):
        for value in (getattr(node, field, None) for field in ("attr", "id", "value", "name")):
            if isinstance(value, str):
                yield value


def test_no_foreign_code_is_read():
    found = {str(path.relative_to(ROOT)): set(words(ast.parse(path.read_text()))) & READERS for path in FILES}
    found["visdet/compat/numpy_names.py"] -= {
        "getsource"
    }  # numpy.source shows a user the source of a function.
    assert not {path: names for path, names in found.items() if names}


@pytest.mark.parametrize(
    "source, found",
    [
        ("from torch._C import _f", "_C._f"),
        ("import runpy\nrunpy._run_module_as_main('x')", "_run_module_as_main"),
        ("layer._forward_hooks", "_forward_hooks"),
        ("vars(layer)['_forward_hooks']", "_forward_hooks"),
        ("getattr(torch, '_foreach_norm')", "_foreach_norm"),
        ("parameter._post_accumulate_grad_hooks = None", "_post_accumulate_grad_hooks"),
        ("from torch.nn.modules.module import _global_forward_pre_hooks", "_global_forward_pre_hooks"),
        ("from importlib._bootstrap import x", "_bootstrap.x"),
    ],
)
def test_the_guard_finds_every_way_to_take_a_private_name(source, found):
    assert found in [name for name, _ in taken_from_others(ast.parse(source), set())]

"""Every private name of mmengine that the package uses: why, and that there is no public one yet."""

import ast
import inspect
import pkgutil
import re
import textwrap
from importlib import import_module

import pytest

import visdet

# For each name of mmengine's class, what it is for, and a pattern of a public name for it, which the class has neither
# in mmengine 0.10.4 to 0.10.7 nor in onedl-mmengine 0.10.12.
USES = {
    "BaseDataset._fully_initialized": ("``full_init`` checks the image files, too.", "^is_.*init"),
    "BaseDataset._get_unserialized_subset": ("``full_init`` checks the images that are left.", "^subset"),
    "BaseDataset._indices": ("``full_init`` checks the images that are left.", "^indices"),
    "BaseDataset._load_metainfo": ("Classes come from the annotation file, too.", "^load_metainfo"),
    "BaseDataset._rand_another": ("Another image is drawn by torch's generator.", "^rand_another"),
    "BaseDataset._serialize_data": ("``full_init`` checks the images before.", "^serialize"),
    "BaseMetric._dataset_meta": ("The metric reads its file when it gets the classes.", "^on_dataset_meta"),
    "BaseModule._dump_init_info": ("mmengine would log two lines for each parameter.", "^dump_init"),
    "BaseDataPreprocessor._non_blocking": ("Samples are copied as the images are.", "^non_blocking"),
    "CheckpointHook._save_best_checkpoint": (
        "The old best file goes after the new one is written.",
        "^save_best_ch",
    ),
    "CheckpointHook._save_checkpoint_with_step": (
        "Old files go after the new one is written.",
        "^save_checkpoint",
    ),
    "EpochBasedTrainLoop._epoch": ("``epoch`` cannot be set.", "^set_epoch"),
    "EpochBasedTrainLoop._iter": ("``iter`` cannot be set.", "^set_iter"),
    "EpochBasedTrainLoop._max_epochs": ("``_progress`` compares it with ``_epoch``.", "^set_epoch"),
    "IterBasedTrainLoop._epoch": ("``epoch`` cannot be set.", "^set_epoch"),
    "IterBasedTrainLoop._iter": ("``iter`` cannot be set.", "^set_iter"),
    "IterBasedTrainLoop._max_epochs": ("``max_epochs`` cannot be set.", "^set_max"),
    "IterBasedTrainLoop._max_iters": ("``max_iters`` cannot be set.", "^set_max"),
    "OptimWrapper._clip_grad": (
        "The norm stays on the device until it is logged.",
        "^clip_grad",
    ),
    "OptimWrapper._inner_count": ("``inner_count`` cannot be set.", "^set_inner"),
    "Registry._locations": ("The modules are imported until one has the name.", "^locations"),
    "Runner._has_loaded": ("A checkpoint that was loaded is not loaded again.", "^(has|is)_loaded"),
    "Runner._load_from": ("The run decides and says which checkpoint it starts from.", "^load_from"),
    "Runner._log_env": ("The log file gets the environment in another form.", "^log_env"),
    "Runner._randomness_cfg": ("A resumed run takes over the seed of the checkpoint.", "^randomness"),
    "Runner._resume": ("The run decides whether there is something to resume.", "^(resume_from|is_resum)"),
    "Visualizer._initialize_fig": (
        "The first figure imports matplotlib, which takes time.",
        "^initialize_fig",
    ),
}
# Names of other objects than ``self``, which a search by class does not find.
OF_OTHERS = {
    "Runner._load_from": r"runner\._load_from",
    "OptimWrapper._accumulative_counts": r"wrapper\._accumulative_counts",
}
USES["OptimWrapper._accumulative_counts"] = ("The report says how many iterations make a step.", "^accumulat")


def private_names(cls: type) -> set[str]:
    """Return the private names that a class defines, or reads or sets as attributes of ``self``."""
    names = set()
    for node in ast.walk(ast.parse(textwrap.dedent(inspect.getsource(cls)))):
        if isinstance(node, ast.Attribute) and ast.unparse(node.value) in ("self", "cls", "super()"):
            names.add(node.attr)
        elif isinstance(node, ast.FunctionDef):
            names.add(node.name)
    return {name for name in names if re.match(r"_[a-z]", name)}


def modules():
    for module in pkgutil.walk_packages(visdet.__path__, "visdet."):
        if not re.match(r"visdet\.(compat|ops|train_extra)\b|.*__main__$", module.name):
            yield import_module(module.name)


def mmengine_classes(cls: type) -> list[type]:
    return [base for base in cls.__mro__[1:] if base.__module__.split(".")[0] == "mmengine"]


def found() -> dict[str, type]:
    """Return mmengine's class of each name that is used."""
    names = {}
    for module in modules():
        source = inspect.getsource(module)
        for cls in vars(module).values():
            if inspect.isclass(cls) and cls.__module__ == module.__name__:
                own = private_names(cls)
                for base in reversed(mmengine_classes(cls)):
                    names |= {f"{base.__name__}.{name}": base for name in own & private_names(base)}
        for name, pattern in OF_OTHERS.items():
            if re.search(pattern, source):
                owner = import_module("mmengine.runner" if name.startswith("Runner") else "mmengine.optim")
                names[name] = getattr(owner, name.split(".")[0])
    return names


@pytest.fixture(scope="module")
def used():
    return found()


def test_no_other_private_name_is_used(used):
    unknown = {name for name in used if name not in USES}
    assert not unknown, "add the use to USES with its reason, or use a public name"


def test_no_entry_is_left_over(used):
    assert not set(USES) - set(used)


def test_there_is_no_public_name_yet(used):
    public = {
        name: [other for other in dir(used[name]) if re.search(pattern, other)]
        for name, (_, pattern) in USES.items()
    }
    assert not any(public.values()), "mmengine may have a public name"

"""visdet's registries, which are children, in scope ``visdet``, of mmengine's registries, and ``OPS`` for functions.

At a look-up, a registry imports the modules in its ``locations`` until one has registered the name. Therefore,
``MODELS.build(dict(type='MultiScaleDeformableAttention', ...))``, and ``type='visdet.DeformableDETR'`` in a config of
another package, work without other imports. An unknown name raises an :class:`UnknownNameError`, which is a
``KeyError``, with the nearest names.
"""

from collections.abc import Iterator
from contextlib import contextmanager, suppress
from functools import partial
from importlib import import_module
from typing import Any

from visdet.checks.arguments import check_constructor, check_texts
from visdet.errors import UnknownNameError, build_step
from visdet.near_names import did_you_mean
from visdet.train_extra import require_train_extra

require_train_extra(__name__)

from mmengine import registry as mmengine_registry
from mmengine.registry import Registry as _MMEngineRegistry
from mmengine.utils import manager

__all__ = [
    "DATASETS",
    "DATA_SAMPLERS",
    "EVALUATOR",
    "FUNCTIONS",
    "HOOKS",
    "INFERENCERS",
    "LOG_PROCESSORS",
    "LOOPS",
    "METRICS",
    "MODELS",
    "MODEL_WRAPPERS",
    "OPS",
    "OPTIMIZERS",
    "OPTIM_WRAPPERS",
    "OPTIM_WRAPPER_CONSTRUCTORS",
    "PARAM_SCHEDULERS",
    "RUNNERS",
    "RUNNER_CONSTRUCTORS",
    "STRATEGIES",
    "TASK_UTILS",
    "TRANSFORMS",
    "VISBACKENDS",
    "VISUALIZERS",
    "WEIGHT_INITIALIZERS",
    "Registry",
    "mmengine_unlocked",
]

SCOPE = "visdet"


@contextmanager
def mmengine_unlocked() -> Iterator[None]:
    """Release mmengine's lock after the block, if an error has left it locked.

    ``ManagerMixin.get_instance`` keeps the lock if a constructor fails. Every other thread that uses a registry would
    then wait for ever.
    """
    lock: Any = manager._lock
    was_held = lock._is_owned()
    try:
        yield
    finally:
        while lock._is_owned() and not was_held:
            lock.release()


class Registry(_MMEngineRegistry):
    """An mmengine registry that raises a ``KeyError`` with the nearest names for an unknown name.

    ``name in registry`` is ``False`` for an unknown name and raises nothing. An error of a build says what was being
    built.

    Args:
        name: the name of the registry.
        variable: the name of the variable in this module. The default is ``name`` in capitals.
        **options: other arguments of mmengine's Registry.
    """

    def __init__(self, name: str, variable: str | None = None, **options: Any) -> None:
        super().__init__(name, **options)
        self._variable = variable or name.upper()

    def register_module(self, name: Any = None, force: bool = False, module: Any = None) -> Any:
        """Register a class or a function; see mmengine. A class of visdet will check its arguments."""
        if module is None:
            return partial(self.register_module, name, force)
        if isinstance(module, type):
            check_constructor(module)
        return super().register_module(name, force, module)

    def build(self, cfg: Any, *args: Any, **kwargs: Any) -> Any:
        """Build the object that a config dict describes; see mmengine's ``Registry.build``.

        A type without a scope is one of this registry if there is one of that name, whatever the default scope is.
        """
        kind = cfg.get("type") if isinstance(cfg, dict) else None
        with build_step(name_of_type(kind) or self.name), mmengine_unlocked():
            if isinstance(kind, str) and cfg.get("_scope_") is None:
                if own := self._own(kind):
                    cfg = {**cfg, "type": own}
                kind = own or (self.parent or self).module_dict.get(kind)
            if isinstance(kind, type):
                check_constructor(kind)
                check_texts(kind, cfg)
            return super().build(cfg, *args, **kwargs)

    def _own(self, key: str) -> Any:
        """Return what this registry itself has under a name, or None."""
        for location in self._locations:
            if key in self.module_dict:
                break
            import_module(location)
        return self.module_dict.get(key)

    def get(self, key: Any) -> Any:
        """Return the object of the name ``key`` in this registry or its parents. A class is returned as it is.

        Raises:
            UnknownNameError: the name is unknown. The message lists the nearest names.
        """
        if not isinstance(key, str):
            return key
        registered = self._own(key)  # Errors of the imports are not caught below.
        with suppress(RuntimeError):  # mmengine raises this if a dotted path cannot be imported.
            registered = registered or super().get(key)
        if registered is None:
            raise UnknownNameError(self._unknown_name_message(key))
        return registered

    def __contains__(self, key: object) -> bool:
        try:
            return isinstance(key, str) and self.get(key) is not None
        except KeyError:
            return False

    def _unknown_name_message(self, key: str) -> str:
        known = [*self.module_dict, *(self.parent.module_dict if self.parent else ())]
        hint = did_you_mean(name_of_type(key), known) or "."
        return (
            f"{key!r} is not in the {self.scope}::{self.name} registry{hint}\n"
            f"A class of your own needs @{self._variable}.register_module() and its file imported, by "
            "custom_imports = dict(imports=['my_package.my_module'], allow_failed_imports=False) in the config."
        )


def name_of_type(kind: Any) -> str:
    """Return the name of a class that a config gives by its name, which may be dotted, or itself, and else ""."""
    return kind.rpartition(".")[2] if isinstance(kind, str) else getattr(kind, "__name__", "")


def built(given: Any, registry: Registry) -> Any:
    """Return what a config dict describes. None, and what has been built before, are returned as they are."""
    return registry.build(given) if isinstance(given, dict) else given


def _child(parent_name: str, *locations: str) -> Registry:
    parent = getattr(mmengine_registry, parent_name)
    return Registry(parent.name, variable=parent_name, parent=parent, scope=SCOPE, locations=list(locations))


# mmengine registers its own names when its packages are imported, and no registry of its own imports them. Therefore,
# some locations are packages of mmengine.
MODELS = _child("MODELS", "visdet.models", "visdet.engine.optim.averages")
MODEL_WRAPPERS = _child("MODEL_WRAPPERS", "mmengine.runner")
WEIGHT_INITIALIZERS = _child("WEIGHT_INITIALIZERS", "mmengine.model")
TASK_UTILS = _child("TASK_UTILS", "visdet.models")

DATASETS = _child(
    "DATASETS",
    "visdet.datasets.coco",
    "visdet.datasets.synthetic.shapes_dataset",
    "visdet.datasets.nuscenes",
    "visdet.datasets.synthetic.driving_scenes",
)
DATA_SAMPLERS = _child("DATA_SAMPLERS", "visdet.datasets.samplers", "mmengine.dataset")
TRANSFORMS = _child(
    "TRANSFORMS",
    "visdet.datasets.transforms.driving",
    "visdet.datasets.transforms.multi_view",
    "visdet.datasets.transforms.formatting",
    # The following ones import torchvision, which takes a second.
    "visdet.datasets.transforms.loading",
    "visdet.datasets.transforms.geometric",
    "visdet.datasets.transforms.photometric",
    "visdet.datasets.transforms.wrappers",
)

METRICS = _child("METRICS", "visdet.evaluation", "visdet.engine.inference.dump_detections")
EVALUATOR = _child("EVALUATOR", "mmengine.evaluator")

RUNNERS = _child("RUNNERS", "visdet.engine.trainer")
RUNNER_CONSTRUCTORS = _child("RUNNER_CONSTRUCTORS")
LOOPS = _child("LOOPS", "mmengine.runner")
HOOKS = _child("HOOKS", "visdet.engine.hooks")
LOG_PROCESSORS = _child("LOG_PROCESSORS", "mmengine.runner")
OPTIMIZERS = _child("OPTIMIZERS", "visdet.engine.optim.muon", "mmengine.optim")
OPTIM_WRAPPERS = _child("OPTIM_WRAPPERS", "visdet.engine.optim.optim_wrapper", "mmengine.runner")
OPTIM_WRAPPER_CONSTRUCTORS = _child("OPTIM_WRAPPER_CONSTRUCTORS", "mmengine.optim")
PARAM_SCHEDULERS = _child("PARAM_SCHEDULERS", "mmengine.optim")
STRATEGIES = _child("STRATEGIES", "mmengine.runner")
INFERENCERS = _child("INFERENCERS")
FUNCTIONS = _child("FUNCTIONS", "mmengine.dataset")

VISUALIZERS = _child("VISUALIZERS", "visdet.visualization")
VISBACKENDS = _child("VISBACKENDS", "mmengine.visualization")

OPS = Registry("op", variable="OPS", scope=SCOPE, locations=["visdet.ops.registration"])

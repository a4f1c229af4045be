"""Models outside Python: ``visdet.export(model, folder, format=...)``, and the formats.

The package is callable, and a call is that of :func:`visdet.export.run.export`.

The order of an export is: :mod:`.families` wraps the stages of a model into a module of named tensors, ``trace`` makes
a :class:`~visdet.export.program.Program` of it, a format writes the program, and :mod:`.check` runs what was written in
the format's own runtime and compares it with the model. A model knows nothing of this.

A format is a module of ``visdet.export.formats`` with its name, whose package says what a module has and declares what
each format can do. A format that exists for one model only, or for no GPU, raises an ``ExportError`` that says what it
lacks.
"""

import sys
import types

from visdet.lazy_names import lazy_names
from visdet.train_extra import require_train_extra

require_train_extra("visdet.export")

__all__, __getattr__, __dir__ = lazy_names(
    __name__,
    {
        "export": "run",
        "ExportError": "errors",
        "Package": "package",
        "Program": "program",
        "Reference": "reference",
    },
)


class _CallableModule(types.ModuleType):
    def __call__(self, *arguments: object, **options: object) -> object:
        return self.export(*arguments, **options)


sys.modules[__name__].__class__ = _CallableModule

"""visdet's detection operators as a kernel for Hugging Face's ``kernels``: torch, the standard library and this folder.

``ops`` is what the package calls ``visdet.ops``. A process can hold the operators once, so that of a ``visdet.ops``
that has been imported before is used.
"""

import sys

if "visdet.ops" in sys.modules:
    ops = sys.modules["visdet.ops"]
else:
    from . import ops

from . import layers

__all__ = ["layers", "ops"]

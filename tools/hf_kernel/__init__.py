"""visdet's detection operators as a kernel for Hugging Face's ``kernels``.

The kernel needs torch and the standard library only. ``ops`` is ``visdet.ops`` of the package. A process can load the
operators only once, so that a ``visdet.ops`` that has already been imported is used instead.
"""

import sys

if "visdet.ops" in sys.modules:
    ops = sys.modules["visdet.ops"]
else:
    from . import ops

from . import layers

__all__ = ["layers", "ops"]

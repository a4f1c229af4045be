"""Puts every public operator into ``OPS``. The registry imports this module at its first look-up."""

import inspect

from visdet import ops
from visdet.registry import OPS

for _name in ops.__all__:
    _member = getattr(ops, _name)
    if inspect.isfunction(_member) and _name not in ("build_info", "explain"):
        OPS.register_module(name=_name, module=_member)

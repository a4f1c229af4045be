"""Stock mmdet configs, run with this package's parts of the same names."""

from typing import Any

from mmengine.config import Config

__all__ = ["adopt_mmdet_scope"]

_PREFIXES = ("mmdet.", "mmcv.")


def adopt_mmdet_scope(cfg: Config) -> list[str]:
    """Turn a config of scope 'mmdet' into one of scope 'visdet', in place; return a remark for the terminal if so.

    The scope is replaced, and the prefixes ``mmdet.`` and ``mmcv.`` of types are dropped. Configs of other
    scopes are left alone, so that one of visdet's may name a part of an installed mmdet on purpose.
    """
    if cfg.get("default_scope") != "mmdet":
        return []
    cfg.default_scope = "visdet"
    count = _strip_prefixes(cfg._cfg_dict)
    return [f"an mmdet config: read with default_scope='visdet' ({count} type prefixes dropped)"]


def _strip_prefixes(node: Any) -> int:
    """Drop the prefixes of every ``type`` under ``node`` and every ``_scope_``; return how many there were."""
    if isinstance(node, list | tuple):
        return sum(_strip_prefixes(item) for item in node)
    if not isinstance(node, dict):
        return 0
    count = int(node.pop("_scope_", None) is not None)
    kind = node.get("type")
    if isinstance(kind, str) and kind.startswith(_PREFIXES):
        node["type"] = kind.split(".", 1)[1]
        count += 1
    return count + sum(_strip_prefixes(item) for item in node.values())

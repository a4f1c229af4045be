"""Running unmodified mmdet configs with the classes of this package that have the same names."""

from typing import Any

from mmengine.config import Config

_PREFIXES = ("mmdet.", "mmcv.")


def adopt_mmdet_scope(cfg: Config) -> list[str]:
    """Turn a config of scope 'mmdet' into one of scope 'visdet', in place.

    The scope is replaced, and the prefixes ``mmdet.`` and ``mmcv.`` of types are dropped. Configs of other scopes
    stay as they are, so that a config of visdet can use a class of an installed mmdet on purpose.

    Returns:
        a list with one remark for the terminal, or an empty list if the config is not of scope 'mmdet'.
    """
    if cfg.get("default_scope") != "mmdet":
        return []
    cfg.default_scope = "visdet"
    count = sum(_strip_prefixes(section) for section in cfg.values())
    return [
        f"this mmdet config is read with default_scope='visdet', and {count} prefixes of types are dropped"
    ]


def _strip_prefixes(node: Any) -> int:
    """Drop the prefix of every ``type`` in ``node`` and every ``_scope_``. Return how many were dropped."""
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

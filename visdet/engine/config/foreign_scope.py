"""Running unmodified mmdet configs with the classes of this package that have the same names."""

from mmengine.config import Config

from .text import dicts_in

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
    count = 0
    for _, node in dicts_in(cfg._cfg_dict):
        count += node.pop("_scope_", None) is not None
        kind = node.get("type")
        if isinstance(kind, str) and kind.startswith(_PREFIXES):
            node["type"] = kind.split(".", 1)[1]
            count += 1
    return [
        f"this mmdet config is read with default_scope='visdet', and {count} prefixes of types are dropped"
    ]

"""A reader of YAML that a short text cannot keep busy."""

from typing import Any

import yaml

__all__ = ["load_yaml"]

_MOST_VALUES = 10**7  # with those that aliases repeat


def load_yaml(text: str, loader: Any = yaml.SafeLoader) -> Any:
    """Return the content of a YAML text.

    Args:
        text: the text.
        loader: the class of the loader, such as ``yaml.FullLoader``.

    Raises:
        yaml.YAMLError: the text is no YAML, nests its values too deeply, or its aliases repeat values without end or
            so often that a walk through all of them would not end in a reasonable time.
    """
    reader = loader(text)
    try:
        root = reader.get_single_node()
        if root is None:
            return None
        _num_values(root, {})
        return reader.construct_document(root)
    except RecursionError as error:
        raise yaml.YAMLError("its values are nested too deeply") from error
    finally:
        reader.dispose()


def _num_values(node: yaml.Node, known: dict[yaml.Node, int]) -> int:
    """Return the number of values in a node, in which those of an alias count wherever it stands."""
    if isinstance(node, yaml.ScalarNode):
        return 1
    count = known.get(node, 0)
    if count:
        return count
    if node in known:
        raise yaml.YAMLError("an alias stands within the value that it repeats")
    known[node] = 0
    count = 1
    for part in node.value:
        for child in part if isinstance(part, tuple) else (part,):  # A mapping has pairs.
            count += _num_values(child, known)
    known[node] = count
    if count > _MOST_VALUES:
        raise yaml.YAMLError(f"its aliases repeat values, so that there are over {_MOST_VALUES}")
    return count

"""YAML as recipes use it: `1e-3` is a number, and no key stands twice in silence."""

from __future__ import annotations

import re
from typing import Any

import yaml

FLOAT_TAG = "tag:yaml.org,2002:float"
EXPONENT = re.compile(r"^[-+]?\d+(\.\d*)?[eE][-+]?\d+$")
"""Numbers that YAML 1.1 takes for text because they have no decimal point or sign."""


MAX_VALUES = 100_000
"""Keys and values in one recipe, aliases written out."""


class Loader(yaml.SafeLoader):
    """Reads recipes."""

    def construct_mapping(self, node: yaml.MappingNode, deep: bool = False) -> dict[Any, Any]:
        """Build a mapping; a key that stands twice is an error, and so is one that is no plain value."""
        seen = set()
        for key_node, _ in node.value:
            if not isinstance(key_node, yaml.ScalarNode):
                raise yaml.MarkedYAMLError(
                    problem="a key is a name, not a list or mapping", problem_mark=key_node.start_mark
                )
            if key_node.value in seen:
                raise yaml.MarkedYAMLError(
                    problem=f"the key {key_node.value!r} stands twice", problem_mark=key_node.start_mark
                )
            seen.add(key_node.value)
        return super().construct_mapping(node, deep=deep)


def read(text: str) -> tuple[Any, yaml.Node | None]:
    """The value that YAML text spells, and its nodes, which know their lines.

    Raises:
        yaml.YAMLError: it is no YAML, or spells no value a recipe can have (a date of month 13, a list in itself).
    """
    loader = Loader(text)
    try:
        node = loader.get_single_node()
        if node is None:
            return None, None
        _bounded(node)
        return loader.construct_document(node), node
    except RecursionError as error:
        raise yaml.YAMLError("it is nested too deeply") from error
    except ValueError as error:  # what a number or date is made by
        raise yaml.YAMLError(str(error)) from error
    finally:
        loader.dispose()


def _bounded(root: yaml.Node) -> None:
    """Refuse text whose aliases spell more values than anyone writes: each would be visited as often as it stands."""
    left = MAX_VALUES
    waiting = [root]
    while waiting:
        node = waiting.pop()
        left -= 1
        if left < 0:
            raise yaml.MarkedYAMLError(
                problem="its aliases make it endless, or nearly so", problem_mark=root.start_mark
            )
        if isinstance(node, yaml.MappingNode):
            waiting += [inner for pair in node.value for inner in pair]
        elif isinstance(node, yaml.SequenceNode):
            waiting += node.value


class Dumper(yaml.SafeDumper):
    """Writes what `Loader` reads back unchanged."""


for _class in (Loader, Dumper):
    _class.add_implicit_resolver(FLOAT_TAG, EXPONENT, list("-+0123456789"))


def dump(value: Any, width: int) -> str:
    """YAML text in the order of `value`, in ASCII: PyYAML breaks some Unicode line ends otherwise."""
    text: str = yaml.dump(value, Dumper=Dumper, sort_keys=False, width=width)
    return text

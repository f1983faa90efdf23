"""YAML as recipes use it: `1e-3` is a number, and no key stands twice in silence."""

from __future__ import annotations

import re
from typing import Any

import yaml

FLOAT_TAG = "tag:yaml.org,2002:float"
EXPONENT = re.compile(r"^[-+]?\d+(\.\d*)?[eE][-+]?\d+$")
"""Numbers that YAML 1.1 takes for text because they have no decimal point or sign."""


class Loader(yaml.SafeLoader):
    """Reads recipes."""

    def construct_mapping(self, node: yaml.MappingNode, deep: bool = False) -> dict[Any, Any]:
        """Build a mapping; a key that stands twice is an error."""
        seen = set()
        for key_node, _ in node.value:
            if key_node.value in seen:
                raise yaml.MarkedYAMLError(
                    problem=f"the key {key_node.value!r} stands twice", problem_mark=key_node.start_mark
                )
            seen.add(key_node.value)
        return super().construct_mapping(node, deep=deep)


class Dumper(yaml.SafeDumper):
    """Writes what `Loader` reads back unchanged."""


for _class in (Loader, Dumper):
    _class.add_implicit_resolver(FLOAT_TAG, EXPONENT, list("-+0123456789"))


def dump(value: Any, width: int) -> str:
    """YAML text in the order of `value`, in ASCII: PyYAML breaks some Unicode line ends otherwise."""
    text: str = yaml.dump(value, Dumper=Dumper, sort_keys=False, width=width)
    return text

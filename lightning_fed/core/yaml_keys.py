"""YAML whose mappings have no key twice: YAML itself would take the last in silence."""

from typing import Any

import yaml


class RepeatedKeyError(yaml.constructor.ConstructorError):
    """A mapping has a key twice.

    Attributes:
        key: The key.
        line: The line of its second appearance, from 1.
    """

    def __init__(self, key: Any, mark: Any) -> None:
        super().__init__(None, None, f"{key!r} comes twice", mark)
        self.key, self.line = key, mark.line + 1


class UniqueKeyLoader(yaml.SafeLoader):
    """PyYAML's safe loader, in which a mapping's keys differ, and have no parts."""

    def compose_mapping_node(self, anchor: Any) -> yaml.MappingNode:
        """Return a mapping as it is written, before ``<<`` puts others into it; raise if a key comes twice."""
        node: yaml.MappingNode = super().compose_mapping_node(anchor)
        seen = set()
        for key_node, _ in node.value:
            if not isinstance(key_node, yaml.ScalarNode):
                raise yaml.constructor.ConstructorError(None, None, "a key has parts", key_node.start_mark)
            is_merge = key_node.tag == "tag:yaml.org,2002:merge"
            key = key_node.value if is_merge else self.construct_object(key_node)
            if key in seen:
                raise RepeatedKeyError(key, key_node.start_mark)
            seen.add(key)
        return node

"""YAML without repeated keys in a mapping: PyYAML would silently keep the last one."""

from typing import Any

import yaml


class RepeatedKeyError(yaml.constructor.ConstructorError):
    """A mapping has a repeated key.

    Attributes:
        key: The key.
        line: The line of its second appearance, from 1.
    """

    def __init__(self, key: Any, mark: Any) -> None:
        super().__init__(None, None, f"{key!r} comes twice", mark)
        self.key, self.line = key, mark.line + 1


class UniqueKeyLoader(yaml.SafeLoader):
    """PyYAML's safe loader, restricted to mappings with distinct scalar keys."""

    def compose_mapping_node(self, anchor: Any) -> yaml.MappingNode:
        """Return a mapping as written, before ``<<`` merges others into it; raise for a repeated or non-scalar key."""
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

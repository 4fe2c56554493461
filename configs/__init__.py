"""Configuration: `load_config` reads YAML over the schema in base.yaml and checks keys, types and rules."""

from .loader import as_plain, dump_config, load_config, shared_settings, task_configs
from .values import NamedSection

__all__ = ["NamedSection", "as_plain", "dump_config", "load_config", "shared_settings", "task_configs"]

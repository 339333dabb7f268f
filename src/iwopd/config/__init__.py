"""One validated tree of settings. A recipe is a TOML file of it; the command line overrides it by dotted names."""

from iwopd.config.cluster import Cluster
from iwopd.config.engines import TeacherSource
from iwopd.config.inputs import Lora
from iwopd.config.marks import defaults, differences, marked, without
from iwopd.config.method import Method
from iwopd.config.mix import MixSettings
from iwopd.config.reading import (
    config_toml,
    flatten,
    load_config,
    make_config,
    make_engine_choice,
    parse_setting,
    parse_value,
    settings,
)
from iwopd.config.reward import Reward
from iwopd.config.training import Optim
from iwopd.config.tree import Config
from iwopd.errors import ConfigError
from iwopd.section import Section

__all__ = [
    "Cluster",
    "Config",
    "ConfigError",
    "Lora",
    "Method",
    "MixSettings",
    "Optim",
    "Reward",
    "Section",
    "TeacherSource",
    "config_toml",
    "defaults",
    "differences",
    "flatten",
    "load_config",
    "make_config",
    "make_engine_choice",
    "marked",
    "parse_setting",
    "parse_value",
    "settings",
    "without",
]

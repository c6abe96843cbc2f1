"""The configuration of a run: frozen dataclasses, presets, and the strict loader of run files."""

from fugaku_gpt.config.load import (
    SettingsLayer,
    build_run_config,
    changed_settings,
    coerce_setting,
    config_values,
    dotted_settings,
    dump_run_config,
    load_run_config,
    preset_names,
    readable_settings,
    valid_keys,
)
from fugaku_gpt.config.schema import (
    CheckpointConfig,
    DataConfig,
    JobConfig,
    LayoutConfig,
    ModelConfig,
    NodeConfig,
    RunConfig,
    TrainingConfig,
)

__all__ = [
    "CheckpointConfig",
    "DataConfig",
    "JobConfig",
    "LayoutConfig",
    "ModelConfig",
    "NodeConfig",
    "RunConfig",
    "SettingsLayer",
    "TrainingConfig",
    "build_run_config",
    "changed_settings",
    "coerce_setting",
    "config_values",
    "dotted_settings",
    "dump_run_config",
    "load_run_config",
    "preset_names",
    "readable_settings",
    "valid_keys",
]

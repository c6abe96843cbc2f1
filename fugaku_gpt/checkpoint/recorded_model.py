"""Reads from a checkpoint's manifest which model it holds."""

from __future__ import annotations

import json
from pathlib import Path

from fugaku_gpt.checkpoint.manifest import Manifest
from fugaku_gpt.config import ModelConfig, load_run_config
from fugaku_gpt.errors import CheckpointError, ConfigError


def recorded_model(checkpoint: Path, manifest: Manifest) -> ModelConfig:
    """Return the model that a checkpoint holds; fields that an older version has not recorded are as by default.

    Args:
        checkpoint: its folder, which messages name.

    Raises:
        CheckpointError: the manifest does not say which model it is, or a field has a value that none has.
    """
    recorded = manifest.config.get("model")
    if not isinstance(recorded, dict) or not recorded:
        raise CheckpointError(f"{checkpoint}: does not say which model it holds (config.model)")
    settings = [f"model.{name}={json.dumps(value)}" for name, value in recorded.items() if value is not None]
    try:
        return load_run_config(overrides=settings, check=False).model
    except ConfigError as error:
        raise CheckpointError(
            f"{checkpoint}: the model that it records (config.model) is not valid here:\n{error}"
        ) from None

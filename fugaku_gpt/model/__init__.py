"""The GPT: reads like a textbook, knows nothing of ranks."""

from fugaku_gpt.model.gpt import GPT, build_model, build_stage, named_parameters, recompute_of

__all__ = ["GPT", "build_model", "build_stage", "named_parameters", "recompute_of"]

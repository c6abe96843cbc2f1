"""The GPT: written to read like a textbook, with all knowledge of ranks left to ``parallel/``."""

from fugaku_gpt.model.gpt import GPT, build_model, build_stage, named_parameters, recompute_of

__all__ = ["GPT", "build_model", "build_stage", "named_parameters", "recompute_of"]

"""The contestants of ``step.py`` and ``peers.py``: a step of ours, of the textbook's model, of Hugging Face's model.

Those of other trainers are in ``other_trainers.py``.

All do the same work: the same random tokens, the same padded vocabulary, the same number of forward and backward passes
per AdamW step, the gradient's norm clipped, and no dropout. A name is one of ``BASES`` followed by any of
``MODIFIERS``, joined by dashes, such as ``textbook-tanh-bf16``.
"""

from __future__ import annotations

import contextlib
import math
import os
from dataclasses import replace
from typing import TYPE_CHECKING, Any, Callable, ContextManager, Dict, List, Optional, Tuple

from turns import Lacking, Work, thread_environment

from fugaku_gpt.checkpoint.hugging_face_models import model_type_of, their_settings
from fugaku_gpt.config import RunConfig
from fugaku_gpt.data.random_samples import RandomSamples

if TYPE_CHECKING:
    import torch

BASES = ("floor", "ours", "textbook", "hf", "trainer", "nanogpt")
MODIFIERS = {
    "tanh": "GELU's tanh form instead of the exact one (for Hugging Face its own default, gelu_new)",
    "bf16": "bfloat16: ours with float32 masters, the others by autocast, the floor's products themselves",
    "spin": "threads wait for each other in the OpenMP library's default way, not as `train` sets it",
}
Loss = Callable[["torch.Tensor", "torch.Tensor"], "torch.Tensor"]


def parse(name: str) -> Tuple[str, Tuple[str, ...]]:
    """Splits a contestant's name into base and modifiers.

    Raises:
        ValueError: there is no such contestant.
    """
    base, *modifiers = name.split("-")
    if base not in BASES or any(modifier not in MODIFIERS for modifier in modifiers):
        raise ValueError(
            f"{name}: no such contestant; valid: one of {', '.join(BASES)}, then any of -{', -'.join(MODIFIERS)}"
        )
    return base, tuple(modifiers)


def settings_of(name: str) -> List[str]:
    """The ``key=value`` settings that the name stands for."""
    _, modifiers = parse(name)
    settings = ["model.gelu=tanh"] if "tanh" in modifiers else []
    return [*settings, "training.dtype=bfloat16"] if "bf16" in modifiers else settings


def environment_of(name: str, threads: int) -> Dict[str, str]:
    """Environment variables of a contestant's processes: ours has those that ``fugaku-gpt train`` sets."""
    from fugaku_gpt.cli.train import thread_variables

    base, modifiers = parse(name)
    if base == "ours" and "spin" not in modifiers:
        return thread_variables(threads)
    return thread_environment(threads)


def setup(name: str, config: RunConfig) -> Work:
    """Sets up a contestant in this process; ``config`` has its settings already.

    Raises:
        Lacking: this build cannot do it.
    """
    base, modifiers = parse(name)
    if base == "floor":
        from gemm_floor import Floor

        return Floor(config).measure
    if base == "ours":
        return ours(config)
    if base in ("trainer", "nanogpt"):
        import other_trainers

        setup_other = {"trainer": other_trainers.hugging_face_trainer, "nanogpt": other_trainers.nanogpt}[base]
        return setup_other(config, "bf16" in modifiers)
    build_model = {"textbook": textbook, "hf": hugging_face}[base]
    return plain_step(build_model(config), config, "bf16" in modifiers)


def ours(config: RunConfig) -> Work:
    """A step of this package on one rank."""
    import torch

    from fugaku_gpt import compat
    from fugaku_gpt.comm import ProcessGrid
    from fugaku_gpt.training.startup import prepare_process
    from fugaku_gpt.training.trainer import Trainer

    if not compat.can_train(getattr(torch, config.training.dtype)):
        raise Lacking(f"this build cannot train in {config.training.dtype}")
    prepare_process(threads())
    trainer = Trainer(config, ProcessGrid.alone(), RandomSamples(config))
    return lambda: trainer.step().loss


def textbook(config: RunConfig) -> "torch.nn.Module":
    """The textbook's model, which returns the mean loss."""
    import torch
    from textbook_gpt import TextbookGPT

    gelu = torch.nn.GELU()
    if config.model.gelu == "tanh":
        gelu = _TanhGELU()
    shape = config.model
    return TextbookGPT(shape.layers, shape.hidden, shape.heads, shape.seq_len, config.padded_vocab, gelu)


def _TanhGELU() -> "torch.nn.Module":
    import torch

    try:
        return torch.nn.GELU(approximate="tanh")
    except TypeError:
        pass

    class Written(torch.nn.Module):
        """The tanh form as nanoGPT wrote it before PyTorch had it."""

        def forward(self, x: "torch.Tensor") -> "torch.Tensor":
            return 0.5 * x * (1.0 + torch.tanh(math.sqrt(2.0 / math.pi) * (x + 0.044715 * torch.pow(x, 3.0))))

    return Written()


def hugging_face(config: RunConfig) -> "torch.nn.Module":
    """Hugging Face's model with random weights, which returns the mean loss."""
    import torch

    class Loss(torch.nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.model = hugging_face_model(config)

        def forward(self, tokens: "torch.Tensor", targets: "torch.Tensor") -> "torch.Tensor":
            # the labels are shifted already: as many tokens count as in the other models
            loss: "torch.Tensor" = self.model(input_ids=tokens, labels=targets, shift_labels=targets).loss
            return loss

    return Loss()


def hugging_face_model(config: RunConfig, **settings: Any) -> Any:
    """The model of a run as ``transformers`` has it (GPT-2, Llama, ...), with random weights and the padded vocabulary.

    Args:
        settings: further settings of its configuration.

    Raises:
        Lacking: there is no ``transformers`` here.
    """
    os.environ["HF_HUB_OFFLINE"] = "1"  # nothing is to be downloaded
    try:
        from transformers import AutoConfig, AutoModelForCausalLM
    except ImportError as error:
        raise Lacking(str(error)) from None
    model = replace(config.model, vocab_size=config.padded_vocab)
    written = their_settings(model, model_type_of(model), "float32", None)
    kind = written.pop("model_type")
    return AutoModelForCausalLM.from_config(AutoConfig.for_model(kind, **{**written, "use_cache": False, **settings}))


def plain_step(
    model: "torch.nn.Module",
    config: RunConfig,
    bf16: bool = False,
    replica: int = 0,
    no_sync: Optional[Callable[[], ContextManager[Any]]] = None,
    optimizer: "Optional[torch.optim.Optimizer]" = None,
) -> Work:
    """A step of a plain PyTorch model, written in the usual way.

    Args:
        replica: the replica whose samples are used.
        no_sync: keeps gradients from being summed over replicas, in all passes but the last.
        optimizer: default: PyTorch's AdamW of all parameters.

    Raises:
        Lacking: there is no autocast for CPUs.
    """
    import torch

    if bf16 and not hasattr(torch, "autocast"):
        raise Lacking("this build has no autocast for CPUs")
    torch.set_num_threads(threads())
    training = config.training
    if optimizer is None:
        betas = (training.beta1, training.beta2)
        optimizer = torch.optim.AdamW(
            model.parameters(), lr=training.lr, betas=betas, weight_decay=training.weight_decay
        )
    samples, count, passes = RandomSamples(config), training.micro_batch, config.micro_batches
    model.train()

    def step() -> float:
        assert optimizer is not None
        optimizer.zero_grad()
        total = 0.0
        for number in range(passes):
            tokens = torch.from_numpy(samples.batch((replica * passes + number) * count, count))
            alone = no_sync is not None and number < passes - 1
            with no_sync() if alone and no_sync is not None else contextlib.nullcontext():
                with torch.autocast("cpu", dtype=torch.bfloat16) if bf16 else contextlib.nullcontext():
                    loss = model(tokens[:, :-1], tokens[:, 1:]) / passes
                loss.backward()
            total += float(loss.detach())
        torch.nn.utils.clip_grad_norm_(model.parameters(), training.clip_grad or math.inf)
        optimizer.step()
        return total

    return step


def threads() -> int:
    """The number of threads of this process, as set by its parent."""
    return int(os.environ["OMP_NUM_THREADS"])

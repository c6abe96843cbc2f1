"""Trainers of others as contestants of ``step.py`` and ``peers.py``: nanoGPT, Hugging Face's Trainer, FSDP2, DeepSpeed.

Each is used as its own documentation has it, for the same work as ours: the same random tokens, the same padded
vocabulary, the same number of forward and backward passes for each AdamW step, the gradient's norm clipped, no dropout.
``make peers`` installs those that are packages into ``.venv-peers``, by the pins of ``env/peers.txt``. nanoGPT is no
package: whoever measures it names a folder with its ``model.py``, which is not part of this repository.
"""

from __future__ import annotations

import contextlib
import importlib.util
import math
import os
import queue
import tempfile
import threading
from pathlib import Path
from typing import TYPE_CHECKING, Any, Dict, List

from contestants import hugging_face_model, plain_step, textbook, threads
from turns import Lacking, Work

from fugaku_gpt.config import RunConfig
from fugaku_gpt.data.random_samples import RandomSamples

if TYPE_CHECKING:
    import torch

NANOGPT = "NANOGPT"  # environment variable: the folder with nanoGPT's model.py


def nanogpt(config: RunConfig, bf16: bool) -> Work:
    """A step of nanoGPT's model, compiled by ``torch.compile``, with the loop and the optimiser of its ``train.py``.

    Raises:
        Lacking: no folder is named, or it has no ``model.py``, or this build cannot compile.
        UsageError: it has no such model.
    """
    import torch

    file = Path(os.environ.get(NANOGPT, "")) / "model.py"
    if not os.environ.get(NANOGPT) or not file.is_file():
        raise Lacking(f"name a folder with nanoGPT's model.py: --nanogpt FOLDER ({file}: no such file)")
    if not hasattr(torch, "compile"):
        raise Lacking("this build has no torch.compile")
    if config.model.settings_unlike_gpt2:
        raise Lacking(f"nanoGPT has GPT-2 alone: {', '.join(config.model.settings_unlike_gpt2)}")
    spec = importlib.util.spec_from_file_location("nanogpt_model", file)
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    shape, training = config.model, config.training
    model = module.GPT(
        module.GPTConfig(
            block_size=shape.seq_len,
            vocab_size=config.padded_vocab,
            n_layer=shape.layers,
            n_head=shape.heads,
            n_embd=shape.hidden,
            dropout=0.0,
            bias=True,
        )
    )
    betas = (training.beta1, training.beta2)
    optimizer = model.configure_optimizers(training.weight_decay, training.lr, betas, "cpu")

    class Loss(torch.nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.model = torch.compile(model)

        def forward(self, tokens: "torch.Tensor", targets: "torch.Tensor") -> "torch.Tensor":
            loss: "torch.Tensor" = self.model(tokens.contiguous(), targets.contiguous())[1]
            return loss

    return plain_step(Loss(), config, bf16, optimizer=optimizer)


def hugging_face_trainer(config: RunConfig, bf16: bool) -> Work:
    """A step of Hugging Face's ``Trainer`` around its own model.

    The Trainer has a loop of its own, which runs in a thread and waits after each step until another is asked for.

    Raises:
        Lacking: ``transformers`` or ``accelerate`` is not installed.
    """
    import torch

    try:
        import accelerate  # noqa: F401  # without it the Trainer fails much later
        from transformers import Trainer, TrainerCallback, TrainingArguments
    except ImportError as error:
        raise Lacking(f"{error}; `make peers` installs it, and --peers-python names its interpreter") from None
    training, samples = config.training, RandomSamples(config)
    losses: List[float] = []
    asked: "queue.Queue[None]" = queue.Queue()
    done: "queue.Queue[Any]" = queue.Queue()

    class Tokens(torch.utils.data.Dataset):  # type: ignore[type-arg]
        def __len__(self) -> int:
            return 2**31

        def __getitem__(self, number: int) -> Dict[str, "torch.Tensor"]:
            tokens = torch.from_numpy(samples.batch(number, 1)[0])
            # the labels are shifted already: as many tokens count as in the other models
            return {"input_ids": tokens[:-1], "labels": tokens[1:], "shift_labels": tokens[1:]}

    class InTurns(Trainer):
        def training_step(self, *arguments: Any, **keywords: Any) -> "torch.Tensor":
            loss: "torch.Tensor" = super().training_step(*arguments, **keywords)
            losses.append(float(loss))
            return loss

        def _get_train_sampler(self, *_: Any) -> "torch.utils.data.Sampler[int]":
            return torch.utils.data.SequentialSampler(self.train_dataset)

    class Pause(TrainerCallback):
        def on_step_end(self, *_: Any, **__: Any) -> None:
            done.put(sum(losses))
            losses.clear()
            asked.get()

    folder = tempfile.TemporaryDirectory(prefix="trainer-")  # which Python removes at its end
    settings = TrainingArguments(
        output_dir=folder.name,
        use_cpu=True,
        bf16=bf16,
        per_device_train_batch_size=training.micro_batch,
        gradient_accumulation_steps=config.micro_batches,
        max_steps=2**30,
        learning_rate=training.lr,
        lr_scheduler_type="constant",
        weight_decay=training.weight_decay,
        adam_beta1=training.beta1,
        adam_beta2=training.beta2,
        max_grad_norm=training.clip_grad,
        remove_unused_columns=False,
        save_strategy="no",
        logging_strategy="no",
        report_to=[],
        disable_tqdm=True,
    )
    trainer = InTurns(hugging_face_model(config), settings, train_dataset=Tokens(), callbacks=[Pause()])

    def run() -> None:
        torch.set_num_threads(threads())
        asked.get()
        try:
            trainer.train()
        except BaseException as error:  # raised where a step is asked for
            done.put(error)

    threading.Thread(target=run, daemon=True).start()

    def step() -> float:
        assert Path(folder.name).is_dir()
        asked.put(None)
        value = done.get()
        if isinstance(value, BaseException):
            raise value
        return float(value)

    return step


def fully_sharded(config: RunConfig, bf16: bool, rank: int, meeting: Path) -> Work:
    """This rank's work in a step of the textbook model under PyTorch's FSDP2 (``fully_shard`` of each block and of the
    model), which shards weights, gradients and the optimiser's state over gloo.

    Args:
        meeting: path of a file that does not exist yet, where the processes meet.

    Raises:
        Lacking: this build has no FSDP2.
    """
    import torch

    try:
        from torch.distributed.device_mesh import init_device_mesh
        from torch.distributed.fsdp import fully_shard
    except ImportError as error:
        raise Lacking(str(error)) from None
    torch.set_num_threads(threads())
    ranks = config.layout.dp
    torch.distributed.init_process_group("gloo", init_method=meeting.as_uri(), rank=rank, world_size=ranks)
    mesh = init_device_mesh("cpu", (ranks,))
    model: Any = textbook(config)
    for block in model.blocks:
        fully_shard(block, mesh=mesh)
    fully_shard(model, mesh=mesh)

    @contextlib.contextmanager
    def no_sync() -> Any:
        model.set_requires_gradient_sync(False)
        try:
            yield
        finally:
            model.set_requires_gradient_sync(True)

    work = plain_step(model, config, bf16, rank, no_sync)
    work()
    return lambda: {"loss": work(), "hidden": None}


def deepspeed_zero(config: RunConfig, bf16: bool, rank: int, meeting: Path) -> Work:
    """This rank's work in a step of the textbook model under DeepSpeed with ZeRO 1, on processors, over gloo.

    Args:
        meeting: path of a file that does not exist yet, where the processes meet.

    Raises:
        Lacking: DeepSpeed is not installed.
    """
    os.environ.update({"DS_ACCELERATOR": "cpu", "LOCAL_RANK": str(rank), "RANK": str(rank)})
    os.environ.update({"WORLD_SIZE": str(config.layout.dp), "LOCAL_SIZE": str(config.layout.dp)})
    import torch

    try:
        import deepspeed
    except ImportError as error:
        raise Lacking(f"{error}; `make peers` installs it, and --peers-python names its interpreter") from None
    torch.set_num_threads(threads())
    ranks, training = config.layout.dp, config.training
    torch.distributed.init_process_group("gloo", init_method=meeting.as_uri(), rank=rank, world_size=ranks)
    deepspeed.init_distributed(dist_backend="gloo", auto_mpi_discovery=False, verbose=False)
    settings = {
        "train_micro_batch_size_per_gpu": training.micro_batch,
        "gradient_accumulation_steps": config.micro_batches,
        "zero_optimization": {"stage": 1},
        "gradient_clipping": training.clip_grad,
        "bf16": {"enabled": bf16},
        "optimizer": {
            "type": "AdamW",
            "params": {
                "lr": training.lr,
                "betas": [training.beta1, training.beta2],
                "weight_decay": training.weight_decay,
            },
        },
        "steps_per_print": 2**31,
    }
    model = textbook(config)
    engine, *_ = deepspeed.initialize(model=model, model_parameters=model.parameters(), config=settings)
    samples, count, passes = RandomSamples(config), training.micro_batch, config.micro_batches

    def step() -> float:
        total = 0.0
        for number in range(passes):
            tokens = torch.from_numpy(samples.batch((rank * passes + number) * count, count))
            loss = engine(tokens[:, :-1], tokens[:, 1:])
            engine.backward(loss)
            engine.step()
            total += float(loss.detach()) / passes
        assert math.isfinite(total)
        return total

    step()
    return lambda: {"loss": step(), "hidden": None}

"""Texts from a trained model: ranks read the prompts and write one line of JSON for each."""

from __future__ import annotations

import json
import tempfile
from dataclasses import dataclass
from pathlib import Path
from typing import List, Mapping, Sequence, Union

from fugaku_gpt.api.settings import FilePath
from fugaku_gpt.api.stopping import pass_on_signal
from fugaku_gpt.errors import EXIT_USAGE, RunFailed, UsageError, missing_package
from fugaku_gpt.launch.model_command import run_model_command

Prompt = Union[str, Mapping[str, object]]


@dataclass(frozen=True)
class GenerationSettings:
    """How texts are generated, and by how many ranks; see the options of ``fugaku-gpt generate``.

    Attributes:
        max_tokens: most tokens of a text.
        temperature: divides the logits; 0 takes the most probable token.
        top_k: number of the most probable tokens to choose from; 0 for all.
        top_p: choose from the fewest tokens that have this probability together.
        repetition_penalty: above 1, tokens that the text already has become less probable.
        seed: another seed gives another text.
        stop: a text ends where it contains one of these.
        batch: texts that grow together.
        ranks: ranks on this machine; those beyond ``tp * pp`` are further replicas.
        tp, pp: tensor-parallel ranks that share each layer, and pipeline stages of the model.
        dtype: type in which the model computes.
        threads: threads of each rank; 0 for its share of the cores.
    """

    max_tokens: int = 128
    temperature: float = 0.0
    top_k: int = 0
    top_p: float = 1.0
    repetition_penalty: float = 1.0
    seed: int = 0
    stop: Sequence[str] = ()
    batch: int = 8
    ranks: int = 1
    tp: int = 1
    pp: int = 1
    dtype: str = "float32"
    threads: int = 0

    def arguments(self) -> List[str]:
        """The options of the command that the settings stand for, without ``--ranks`` and ``--threads``."""
        values = {
            "--max-tokens": self.max_tokens,
            "--temperature": repr(self.temperature),
            "--top-p": repr(self.top_p),
            "--repetition-penalty": repr(self.repetition_penalty),
            "--seed": self.seed,
            "--batch": self.batch,
            "--tp": self.tp,
            "--pp": self.pp,
            "--dtype": self.dtype,
        }
        if self.top_k:
            values["--top-k"] = self.top_k
        return [f"{name}={value}" for name, value in values.items()] + [f"--stop={text}" for text in self.stop]


@dataclass(frozen=True)
class GeneratedText:
    """A text that continues a prompt.

    Attributes:
        prompt: the prompt as it was given.
        text: the text.
        reason: why it ended.
        prompt_tokens, tokens: number of tokens of the prompt, and of the text.
    """

    prompt: object
    text: str
    reason: str
    prompt_tokens: int
    tokens: int


_DEFAULT = GenerationSettings()


def generate(
    source: FilePath,
    prompts: Union[str, Sequence[Prompt]],
    *,
    chat: bool = False,
    checkpoint: str = "",
    tokenizer: str = "",
    settings: GenerationSettings = _DEFAULT,
) -> List[GeneratedText]:
    """Continue prompts with a trained model, as ``fugaku-gpt generate`` does, on ranks of their own.

    Args:
        source: a run directory, a folder of checkpoints, or a checkpoint.
        prompts: one text, or several; one may be ``{"messages": [...]}`` for a model with a chat template.
        chat: whether a text is what a user says.
        checkpoint: ``best``, or the name of one of several checkpoints; default: the newest valid one.
        tokenizer: a ``tokenizer.json``, or its folder; default: that of the model.
        settings: how texts are chosen, and the ranks.

    Raises:
        UsageError: there is no such model, a prompt is too long, or a setting is not valid.
        RunFailed: a rank failed.
        KeyboardInterrupt: it was ended by Ctrl-C; SIGTERM reaches the program as in ``train``.
    """
    texts: Sequence[Prompt] = [prompts] if isinstance(prompts, str) else prompts
    with tempfile.TemporaryDirectory() as folder:
        file = Path(folder) / "prompts.jsonl"
        file.write_text("".join(f"{json.dumps(prompt)}\n" for prompt in texts), encoding="utf-8")
        arguments = ["generate", str(source), f"--prompts={file}", "--format=jsonl", *settings.arguments()]
        arguments += ["--chat"] if chat else []
        arguments += [f"--checkpoint={checkpoint}"] if checkpoint else []
        arguments += [f"--tokenizer={tokenizer}"] if tokenizer else []
        try:
            ended = run_model_command(arguments, settings.ranks, settings.threads or None)
        except ModuleNotFoundError as error:
            raise missing_package(error) or error from None
    pass_on_signal(ended.stopped_by)
    if ended.code == EXIT_USAGE:
        raise UsageError(ended.message)
    if ended.code:
        raise RunFailed(ended.message)
    return [GeneratedText(**json.loads(line)) for line in ended.output]

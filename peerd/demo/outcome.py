"""The demo's last act: bring the stages' checkpoints together in one folder, and let the model write.

The only part of the demo that computes; torch is imported here, when all other processes are gone.
"""

from __future__ import annotations

import shutil
from pathlib import Path
from typing import Final

from peerd.core.errors import PeerdError
from peerd.core.runfile import RunFile

CHARACTERS: Final = 200
SPARE_TOKENS: Final = 56  # a byte is not always a character
PROMPT: Final = "def "


def gather_checkpoint(folder: Path, run: RunFile) -> Path:
    """`folder`/checkpoint with one folder per stage: the newest that any of the demo's peers saved."""
    target = folder / "checkpoint"
    for stage in range(run.pipeline.stages):
        found = [path.parent for path in folder.glob(f"*/stage/checkpoints/*/stage-{stage}/step-*.json")]
        if not found:
            raise PeerdError(f"no peer of stage {stage} saved a checkpoint; logs are in {folder}")
        newest = max(found, key=lambda path: (max(file.name for file in path.glob("step-*.json")), path.name))
        shutil.copytree(newest, target / f"stage-{stage}")
    shutil.copy(folder / "run.yaml", target / "run.yaml")
    return target


def sample(checkpoint: Path, run: RunFile) -> str:
    """Text written by the model of a gathered checkpoint."""
    from peerd.compute.model.assemble import load_whole_model
    from peerd.compute.model.generate import generate
    from peerd.compute.tokenizer import load_vocabulary

    stages = [checkpoint / f"stage-{stage}" for stage in range(run.pipeline.stages)]
    model, _ = load_whole_model(run, stages)
    vocabulary = load_vocabulary(run.model.vocab)
    text = generate(model, vocabulary, run.model.context, PROMPT, CHARACTERS + SPARE_TOKENS)
    return (PROMPT + text)[:CHARACTERS]

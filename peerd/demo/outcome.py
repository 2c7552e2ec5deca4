"""The demo's last act: bring the stages' checkpoints together in one folder, and let the model write.

The only part of the demo that computes; torch is imported here, when all other processes are gone.
"""

from __future__ import annotations

import shlex
import shutil
import sys
from pathlib import Path
from typing import Final

from peerd.core.errors import PeerdError
from peerd.core.run.runfile import RunFile

CHARACTERS: Final = 200
EVALUATED_BYTES: Final = 200_000  # at most, of the file to evaluate on: some seconds
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
    from peerd.compute.export.loaded_model import Style, Uncached, write_text
    from peerd.compute.model.assemble import load_whole_model
    from peerd.compute.tokenizer import load_vocabulary

    stages = [checkpoint / f"stage-{stage}" for stage in range(run.pipeline.stages)]
    model, _ = load_whole_model(run, stages)
    vocabulary = load_vocabulary(run.model.vocab)
    whole = Uncached(model, run.model.context, vocabulary.separator)
    text = "".join(write_text(whole, vocabulary, PROMPT, CHARACTERS + SPARE_TOKENS, Style()))
    return (PROMPT + text)[:CHARACTERS]


def commands(folder: Path, run: RunFile) -> list[str]:
    """Command lines that export the demo's model, let it write, and measure it."""
    model, peerd = folder / "model", _how_to_call()
    typed = [
        [*peerd, "export", str(folder), "--out", str(model)],
        [*peerd, "generate", "--from", str(model), PROMPT],
        [*peerd, "evaluate", "--from", str(model), str(_held_out(run))],
    ]
    return [shlex.join(words) for words in typed]


def _how_to_call() -> list[str]:
    """The command of this installation: by its name where the shell finds it."""
    beside = Path(sys.executable).parent / "peerd"
    found = shutil.which("peerd")
    if found is not None and Path(found).resolve() == beside.resolve():
        return ["peerd"]
    return [str(beside)] if beside.is_file() else [sys.executable, "-m", "peerd"]


def _held_out(run: RunFile) -> Path:
    """A file of the run's validation text; of few files a part of each is held out, and this is one of them."""
    from peerd.compute.data.corpus import Corpus
    from peerd.core.run.runfile import sources_of

    key, source = sources_of(run.data)[0]
    files = [Path(str(file)) for file in Corpus(source, run.data.holdout, "valid", key).files]
    sizes = {file: file.stat().st_size for file in files}
    return max((file for file in files if sizes[file] <= EVALUATED_BYTES), key=sizes.__getitem__, default=files[0])

"""Checks of what a run needs on this machine: token, tokenizer, text, model, memory, disk space for checkpoints.

The roles determine which checks apply. Each check calls the functions that the roles call, so it has the same outcome.
"""

from __future__ import annotations

import importlib
import shutil
import time
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from peerd.access.token_files import CredentialFiles, own_papers
from peerd.cli.doctor.check_result import CheckResult, CheckVerdict, failed
from peerd.core.errors import ConfigError
from peerd.core.keys import Keypair
from peerd.model.shapes.stage_memory import StageFootprint
from peerd.run.home import IDENTITY_FILE, load_identity, locked
from peerd.run.runfile import RunFile, disk_bytes, precision_text, sources_of, unused_precision


@dataclass(frozen=True, slots=True)
class RunNeeds:
    """A run, and the roles that will take part in it from this data directory. Without roles: stages and trainers."""

    run: RunFile
    roles: tuple[str, ...]
    data_dir: Path
    device: str

    @property
    def holds_model(self) -> bool:
        """True if a stage, or the whole model, is computed here."""
        if self.run.loop is not None:  # the user's own program computes it
            return False
        whole = "trainer" in self.roles and self.run.pipeline.stages == 1
        return not self.roles or "stage" in self.roles or whole

    @property
    def reads_text(self) -> bool:
        return self.run.loop is None and (not self.roles or "trainer" in self.roles)


def run_checks(needs: RunNeeds) -> Iterator[CheckResult]:
    """Run all checks that apply to the roles."""
    yield token_check(needs)
    yield from precision_checks(needs)
    try:
        importlib.import_module("peerd.model.devices")
    except ImportError:
        yield CheckResult("model", CheckVerdict.UNKNOWN, "not checked: torch is not installed", "pip install torch")
        return
    if needs.holds_model or needs.reads_text:
        vocabulary = _vocabulary(needs.run)
        yield vocabulary
        if vocabulary.verdict == CheckVerdict.FAIL:
            return
    if needs.reads_text:
        yield from _text(needs.run)
    if needs.holds_model:
        yield from _model(needs)
    if "backbone" in needs.roles and needs.run.loop is None:
        yield _room_to_keep(needs)


def token_check(needs: RunNeeds) -> CheckResult:
    """Check the token that a run for invited peers requires."""
    run, place = needs.run, needs.data_dir
    if run.access.allow == "open":
        return CheckResult("token", CheckVerdict.OK, "the run is open to all")
    if not (place / IDENTITY_FILE).exists():
        found = f"run {run.run} admits members by token, and this peer has no identity yet to issue one for"
        typed = f"peerd identity --data-dir {place}"
        return CheckResult(
            "token", CheckVerdict.FAIL, found, f"type: {typed}; ask the organizer for a token for the id that it shows"
        )
    try:
        papers = own_papers(run, needs.roles, place, load_identity(place).peer_id, time.time())
    except ConfigError as error:
        return failed("token", error)
    found = "none needed: this is the organizer's own peer" if papers.is_organizer else f"valid: {papers.token_path}"
    return CheckResult("token", CheckVerdict.OK, found)


def precision_checks(needs: RunNeeds) -> Iterator[CheckResult]:
    """Report the precision of a stage if it is not full precision, and a limits.precision that has no effect."""
    run = needs.run
    if needs.holds_model and (text := precision_text(run)) is not None:
        yield CheckResult("precision", CheckVerdict.OK, f"a stage is computed in {text}")
    hosts = "expert" in needs.roles
    if (hosts or run.loop is not None) and (unused := unused_precision(run, hosts_experts=hosts)) is not None:
        yield CheckResult("limits.precision", CheckVerdict.WARN, unused, "leave limits.precision out")


def visiting_as(needs: RunNeeds) -> tuple[Keypair | None, CredentialFiles | None]:
    """Identity and token to connect with in a run for invited peers.

    Returns (None, None) if the run needs no token, the token is not valid, or a daemon with this identity is running.
    """
    if needs.run.access.allow == "open" or token_check(needs).verdict != CheckVerdict.OK:
        return None, None
    try:
        with locked(needs.data_dir):
            pass
    except ConfigError:
        return None, None
    keypair = load_identity(needs.data_dir)
    return keypair, own_papers(needs.run, needs.roles, needs.data_dir, keypair.peer_id, time.time())


def _vocabulary(run: RunFile) -> CheckResult:
    from peerd.data.tokenizer import load_vocabulary

    try:
        vocabulary = load_vocabulary(run.model.vocab)
    except ConfigError as error:
        return failed("tokenizer", error, "ask the organizer for the file, and set model.vocab to its path")
    return CheckResult("tokenizer", CheckVerdict.OK, f"{run.model.vocab}, {vocabulary.size:,} tokens")


def _is_at_ends(run: RunFile, files: int) -> bool:
    """True if the held-out text is at the ends of remote files, which would have to be fetched as a whole."""
    from peerd.data.corpus import FEW_FILES
    from peerd.data.files.remote_files import is_remote

    return files < FEW_FILES and any(is_remote(source.path) for _, source in sources_of(run.data))


def _text(run: RunFile) -> Iterator[CheckResult]:
    """Check that the sources open, that indexes over http(s) match their digests, and that samples can be read."""
    from peerd.data.files.http_fetch import DataUnavailable
    from peerd.data.stream import samples_of

    paths = ", ".join(source.path for _, source in sources_of(run.data))
    splits = [("text", "train"), *([("text to validate", "valid")] if run.evaluate.every_steps else [])]
    for check, split in splits:
        try:
            stream = samples_of(run, "doctor", "train" if split == "train" else "valid")
            if split == "valid" and _is_at_ends(run, stream.files):
                text = f"{paths}: at the ends of {stream.files} files, which this check does not fetch"
                yield CheckResult(check, CheckVerdict.OK, text)
                return
            stream.take(1)
        except ConfigError as error:
            yield failed(check, error, "put the text there, or set data.path to its location")
            return
        except DataUnavailable as error:
            yield CheckResult(check, CheckVerdict.FAIL, str(error), "a trainer would wait for it: is the server up?")
            return
        yield CheckResult(check, CheckVerdict.OK, f"{paths}: {stream.files} files, samples can be read")


def _model(needs: RunNeeds) -> Iterator[CheckResult]:
    """Check that the model can be built, that a stage's gradient can be averaged, and that memory and disk suffice."""
    from peerd.model.stage.footprint import footprint, refuse_if_not_averaged

    run = needs.run
    stages = run.limits.stages or list(range(run.pipeline.stages))
    try:
        for stage in stages:
            refuse_if_not_averaged(run, stage)
        taken = [footprint(run, stage) for stage in stages]
    except ConfigError as error:
        yield failed("model", error, "ask the organizer for the file, or fix it")
        return
    total = sum(one.parameters for one in taken)
    yield CheckResult("model", CheckVerdict.OK, f"{run.model.kind}, {total:,} parameters in stages {_listed(stages)}")
    memory = _memory(needs, taken)
    if memory.verdict in (CheckVerdict.OK, CheckVerdict.WARN) and run.model.kind != "gpt":
        try:
            memory = _memory(needs, _measured(needs, taken))
        except ConfigError as error:
            yield failed("model", error, "ask the organizer for the file, or fix it")
    yield memory
    yield _disk(needs, taken)


def _measured(needs: RunNeeds, taken: list[StageFootprint]) -> list[StageFootprint]:
    """`taken` with measured activations of the user's own layers, for the stages that fit into memory.

    Raises ConfigError if a layer cannot be built, or fails.
    """
    from peerd.model.stage.footprint import measured_footprint

    lacks = _lacks(needs, taken)
    return [one if one.stage in lacks else measured_footprint(needs.run, one.stage) for one in taken]


def _lacks(needs: RunNeeds, taken: list[StageFootprint], least: bool = True) -> dict[int, str]:
    """Stages that do not fit into memory, each with the reason. `least`: see `StageFootprint.on`.

    Raises RuntimeError if the device is missing.
    """
    from peerd.model.stage.footprint import lacking

    allowed = needs.run.limits.memory_gb * 1e9
    lacks = ((one.stage, lacking(one, needs.device, allowed, least)) for one in taken)
    return {stage: lack for stage, lack in lacks if lack is not None}


def _memory(needs: RunNeeds, taken: list[StageFootprint]) -> CheckResult:
    """Check the memory for the stages in `taken`. Warns if only some of them fit."""
    try:
        lacks = _lacks(needs, taken)
    except RuntimeError as error:  # the device is missing
        return CheckResult("memory", CheckVerdict.UNKNOWN, str(error).splitlines()[0])
    if not lacks:
        trunks = [one for one in taken if one.flights.flights]
        lack = next(iter(_lacks(needs, trunks, least=False).values()), None)
        return _enough(needs, taken) if lack is None else _not_for_all_flights(trunks[0], lack)
    found = next(iter(lacks.values()))
    if len(lacks) < len(taken):
        fits = [one.stage for one in taken if one.stage not in lacks]
        advice = f"let this peer serve a stage that fits: limits.stage: {fits[0]} (fit: {_listed(fits)})"
        return CheckResult("memory", CheckVerdict.WARN, found, advice)
    return CheckResult("memory", CheckVerdict.FAIL, found, "add memory, or split the run into more, smaller stages")


def _enough(needs: RunNeeds, taken: list[StageFootprint]) -> CheckResult:
    most = max(taken, key=lambda one: sum(one.on(needs.device)))
    there = max(one.on(needs.device)[0] for one in taken)
    of_device = f", of these {_size(there)} on {needs.device}" if there else ""
    found = f"enough for each stage, {_size(sum(most.on(needs.device)))} at most{of_device}"
    parts = f"activations of a microbatch ({_size(most.activation_bytes(needs.device))})"
    if most.flights.flights:
        parts += f" and {_flights(most)} ({_size(sum(most.flights.most))})"
    return CheckResult("memory", CheckVerdict.OK, f"{found}, with {parts}; Python and torch need memory, too")


def _not_for_all_flights(trunk: StageFootprint, lack: str) -> CheckResult:
    """Warning that memory suffices for the trunk, but not for all microbatches that may be in flight."""
    fewer = f"add memory, or allow fewer microbatches: limits.microbatches_in_flight less than {trunk.flights.flights}"
    return CheckResult("memory", CheckVerdict.WARN, f"with {_flights(trunk)}, {lack}", fewer)


def _flights(trunk: StageFootprint) -> str:
    copies = f" and {trunk.flights.copies} copies of earlier parameters" if trunk.flights.copies else ""
    return f"{trunk.flights.flights} microbatches in flight{copies}"


def _disk(needs: RunNeeds, taken: list[StageFootprint]) -> CheckResult:
    """Check the disk space for the checkpoints that a stage keeps, and one more that is being written.

    With `limits.memory_gb`, the state that it is written from may need a copy on disk.
    """
    keep, each = needs.run.checkpoint.keep, max(one.checkpoint_bytes for one in taken)
    need = (keep + 1) * each
    check, most = "room for checkpoints", disk_bytes(needs.run)
    if most is not None and 2 * each > most:
        found = f"the last two checkpoints take {_size(2 * each)}, and limits.disk_gb (--disk-gb) allows {_size(most)}"
        return CheckResult(check, CheckVerdict.WARN, found, "raise the limit")
    need = need if most is None else min(need, most)
    if needs.run.limits.memory_gb:
        return _room(needs, check, f"{keep} checkpoints, one being written and a copy of its state take", need + each)
    return _room(needs, check, f"{keep} checkpoints and one being written take", need)


def _room_to_keep(needs: RunNeeds) -> CheckResult:
    """Check the disk space for the sets that a backbone keeps, each with a checkpoint of every stage.

    Counts one more set that is being written, and the fetched states that it is written from.
    """
    from peerd.model.stage.footprint import footprint

    check, keep = "room for kept checkpoints", needs.run.checkpoint.keep
    try:
        each = [footprint(needs.run, stage).checkpoint_bytes for stage in range(needs.run.pipeline.stages)]
    except ConfigError as error:
        return failed(check, error, "ask the organizer for the file, or fix it")
    sets = f"{keep} sets of checkpoints of all {len(each)} stages, one being written and one being fetched take"
    return _room(needs, check, sets, (keep + 2) * sum(each) + max(each))


def _room(needs: RunNeeds, check: str, what: str, need: int) -> CheckResult:
    """Check that the disk has `need` bytes for `what`. Existing checkpoints of the run count as free space."""
    place = needs.data_dir
    try:
        free = shutil.disk_usage(place).free
        there = sum(file.stat().st_size for file in place.glob(f"*/checkpoints/{needs.run.run}/*/*.safetensors"))
    except OSError as error:
        return CheckResult(check, CheckVerdict.FAIL, f"{place}: {error.strerror or error}")
    found = f"{what} {_size(need)}; {_size(free)} are free"
    if need <= free + there:
        return CheckResult(check, CheckVerdict.OK, found)
    return CheckResult(check, CheckVerdict.FAIL, found, "free some space, or choose another --data-dir")


def _listed(stages: list[int]) -> str:
    return f"{stages[0]} to {stages[-1]}" if len(stages) > 2 else " and ".join(map(str, stages))


def _size(count: float) -> str:
    return f"{count / 1e9:.1f} GB" if count >= 1e9 else f"{count / 1e6:.1f} MB"

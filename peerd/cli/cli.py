"""The command line: parses options, builds a plan, runs it, and turns each failure into one message and an exit code.

There are few options; all other settings are in the run file. Exit codes: 0 done, 1 failed, 2 wrong usage or config.
Large modules are imported only if needed: `peerd status` imports neither torch nor the network. Tracebacks never reach
the terminal; a bug's details are written to a file.
"""

from __future__ import annotations

import contextlib
import errno
import json
import os
import re
import signal
import sys
import tempfile
import traceback
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from types import FrameType, TracebackType
from typing import TYPE_CHECKING, Annotated, Any, Final, Literal, NoReturn

import typer
from msgspec import structs

from peerd.cli import evaluate, export, generate, identity, options, token
from peerd.cli.grouped_help import ORGANIZE, TAKE_PART, USE, GroupedCommands, GroupedOptions
from peerd.cli.plan import plan
from peerd.core.errors import ConfigError, PeerdError, missing_package
from peerd.core.version import VERSION
from peerd.daemon.control.guest import GuestFlags, JoinRequest, obey, settled
from peerd.run.runfile import LimitsSection

if TYPE_CHECKING:
    from peerd.role.role import Role
    from peerd.run.config import LoadedRun
    from peerd.run.runfile import RunFile

# A fixed port, so that a published join line stays valid.
BACKBONE_LISTEN: Final = ("/ip4/0.0.0.0/tcp/31337", "/ip6/::/tcp/31337")
ANY_PORT: Final = ("/ip4/0.0.0.0/tcp/0", "/ip6/::/tcp/0")

app = typer.Typer(
    name="peerd",
    cls=GroupedCommands,
    help="Pool computers over the internet to train neural networks together.",
    no_args_is_help=True,
    add_completion=False,
    rich_markup_mode=None,
    pretty_exceptions_enable=False,
)

app.add_typer(token.app, name="token", rich_help_panel=ORGANIZE)
app.command(rich_help_panel=USE)(export.export)
app.command(rich_help_panel=USE)(generate.generate)
app.command(rich_help_panel=USE)(evaluate.evaluate)
app.command(rich_help_panel=ORGANIZE)(plan.plan)


def _version(wanted: bool) -> None:
    if wanted:
        typer.echo(f"peerd {VERSION}")
        raise typer.Exit


@app.callback()
def _root(
    version: Annotated[
        bool, typer.Option("--version", callback=_version, is_eager=True, help="Print the version and exit.")
    ] = False,
) -> None:
    """Pool computers over the internet to train neural networks together."""


@app.command(rich_help_panel=ORGANIZE)
def backbone(
    model: options.RunFileOption = None,
    bootstrap: options.Bootstrap = None,
    listen: options.Listen = None,
    announce: options.Announce = None,
    data_dir: options.DataDir = None,
    seed: options.Seed = None,
    log_level: options.LogLevel = "info",
) -> None:
    """Run an entry point through which others join."""
    _start(Flags(["backbone"], model, bootstrap, listen, data_dir, "cpu", seed, log_level, announce=announce))


@app.command(cls=GroupedOptions, rich_help_panel=TAKE_PART)
def join(
    link: Annotated[str | None, typer.Argument(metavar="[LINK]", help="A join link: peerd://...")] = None,
    role: Annotated[
        list[str] | None,
        typer.Option(
            "--role",
            metavar="ROLE",
            help="stage, trainer, ... or module:Class. Repeatable. [default with LINK: what the run needs]",
        ),
    ] = None,
    model: options.RunFileOption = None,
    bootstrap: options.Bootstrap = None,
    listen: options.Listen = None,
    announce: options.Announce = None,
    data_dir: options.DataDir = None,
    device: options.Device = "cpu",
    alone: Annotated[bool, typer.Option("--alone", help="Start even if no bootstrap peer can be reached.")] = False,
    upload_mbit: options.UploadMbit = None,
    download_mbit: options.DownloadMbit = None,
    threads: options.Threads = None,
    nice: options.Nice = None,
    memory_gb: options.MemoryGb = None,
    disk_gb: options.DiskGb = None,
    hours: options.HoursOfDay = None,
    trust: options.Trust = None,
    seed: options.Seed = None,
    log_level: options.LogLevel = "info",
    yes: options.Yes = False,
    data: options.OwnText = None,
    token: options.OwnToken = None,
    allow_code: options.AllowCode = None,
    tokenizer: options.OwnTokenizer = None,
) -> None:
    """Join a run from a join link or its run file."""
    guest = GuestFlags(
        upload_mbit=upload_mbit,
        download_mbit=download_mbit,
        threads=threads,
        nice=nice,
        memory_gb=memory_gb,
        hours=hours,
        trust=trust,
        disk_gb=disk_gb,
    )
    flags = Flags(
        role or [], model, bootstrap, listen, data_dir, device, seed, log_level, alone, guest, announce=announce
    )
    wish = JoinRequest(yes, data, token, tuple(allow_code or ()), tokenizer)
    if link is not None:
        flags = _by_link(link, flags, wish)
    elif not role:
        raise ConfigError("nothing to join; pass a link like peerd://HOST:PORT/PEER/RUN, or --role ROLE --model FILE")
    elif wish != JoinRequest():
        names = "--yes, --data, --token, --allow-code and --tokenizer"
        raise ConfigError(f"{names} need a join link peerd://...; without one, use the run file")
    _start(flags)


def _by_link(text: str, flags: Flags, wish: JoinRequest) -> Flags:
    """Fetch and accept the run file of a join link. Returns the flags with that file."""
    from peerd.cli import joining
    from peerd.messages.run_link import JoinLink
    from peerd.run.home import run_data_dir

    if flags.file is not None:
        raise ConfigError("pass either a join link peerd://... or --model FILE, not both")
    link = JoinLink.parse(text)
    for stop in (signal.SIGINT, signal.SIGTERM):
        signal.signal(stop, _stop_early)
    offered = joining.fetch(link)
    roles = flags.roles or joining.default_roles(offered)
    run = joining.accept(offered, link, roles, wish)
    place = flags.data_dir or run_data_dir(link.run, roles)
    file = joining.agree(run, link, place, wish)
    if not flags.roles:
        typer.echo(f"peerd: joining as {roles[0]}, which this run needs; choose another role with --role", err=True)
    return replace(flags, roles=roles, file=file, bootstrap=flags.bootstrap or [str(link.addr)], data_dir=place)


@app.command(rich_help_panel=TAKE_PART)
def status(
    swarm: Annotated[
        bool, typer.Option("--swarm", help="Only the swarm, its network, and each peer's contribution.")
    ] = False,
    watch: Annotated[bool, typer.Option("--watch", help="Show it live until Ctrl+C.")] = False,
    as_json: options.AsJson = False,
    as_metrics: Annotated[bool, typer.Option("--metrics", help="Print metrics for Prometheus.")] = False,
    data_dir: options.DataDir = None,
) -> None:
    """Show a running daemon and its swarm."""
    from peerd.daemon.control import socket
    from peerd.status import snapshot
    from peerd.status.view import metrics, status_view, watch_view

    def ask() -> dict[str, Any]:
        told = socket.ask(data_dir)
        return status_view.swarm_of(told) if swarm else told

    with contextlib.suppress(KeyboardInterrupt):
        if watch:
            watcher = watch_view.Watcher()
            watch_view.watch(ask, as_json=as_json, draw=watcher.draw_swarm if swarm else watcher.draw)
        elif as_metrics:
            told = snapshot.decode_status(socket.ask(data_dir), snapshot.StatusSnapshot)
            typer.echo(metrics.metrics_text(told), nl=False)
        elif as_json:
            typer.echo(json.dumps(ask(), indent=1, ensure_ascii=False))
        else:
            status_view.show(ask(), swarm=swarm)


@app.command(rich_help_panel=TAKE_PART)
def demo(
    kind: Annotated[
        Literal["stages", "moe"], typer.Option(help="A pipeline of stages, or a mixture of experts.")
    ] = "stages",
    steps: Annotated[int | None, typer.Option(min=1, help="Global steps to train.")] = None,
    data: Annotated[str | None, typer.Option(metavar="PATH", help="Your own text: a file, a folder or a glob.")] = None,
    calm: Annotated[bool, typer.Option("--calm", help="Do not kill a peer.")] = False,
    as_json: options.AsJson = False,
    data_dir: options.DataDir = None,
) -> None:
    """Train a small model with a swarm on this machine.

    One of its peers is killed; the others continue without losing a step.
    """
    from peerd.cli.demo import story

    try:
        wish = story.DemoConfig(steps=steps, data=data, calm=calm, as_json=as_json, folder=data_dir, kind=kind)
        code = story.run(wish)
    except KeyboardInterrupt:  # before the first or after the last process; otherwise the demo handles Ctrl+C
        typer.echo("stopped", err=True)
        code = 0
    raise typer.Exit(code)


app.command(rich_help_panel=TAKE_PART)(identity.identity)


@app.command(rich_help_panel=TAKE_PART)
def doctor(
    model: options.RunFileOption = None,
    role: Annotated[
        list[str] | None,
        typer.Option("--role", metavar="ROLE", help="Role to check for. Repeatable. [default: all roles]"),
    ] = None,
    bootstrap: options.Bootstrap = None,
    listen: options.Listen = None,
    announce: options.Announce = None,
    data_dir: options.DataDir = None,
    device: options.Device = "cpu",
    as_json: options.AsJson = False,
) -> None:
    """Check that this machine has what `peerd join` needs."""
    from peerd.cli.doctor import checkup as checks

    loaded = _load(model, bootstrap, listen, announce)
    run = loaded.run if loaded is not None else None
    wish = checks.CheckupConfig(
        roles=tuple(role or ()),
        run=run,
        uncompared=tuple(loaded.unknown) if loaded is not None else (),
        bootstrap=_chosen(bootstrap, run.bootstrap if run is not None else []),
        listen=_chosen(listen, run.listen if run is not None else ANY_PORT),
        announced=_chosen(announce, run.announce if run is not None else []),
        data_dir=data_dir or home_of(run, role or []),
        device=_device(device),
    )
    raise typer.Exit(checks.run(wish, as_json=as_json))


@dataclass(frozen=True, slots=True)
class Flags:
    """Command-line arguments of `backbone` and `join`."""

    roles: list[str]
    file: Path | None
    bootstrap: list[str] | None
    listen: list[str] | None
    data_dir: Path | None
    device: str
    seed: int | None
    log_level: str
    alone: bool = False
    guest: GuestFlags = field(default_factory=GuestFlags)
    announce: list[str] | None = None


def _start(flags: Flags) -> None:
    from peerd.log import check_level

    check_level(flags.log_level)
    _device(flags.device)
    loaded = _load(flags.file, flags.bootstrap, flags.listen, flags.announce)
    run = loaded.run if loaded is not None else None
    limits = flags.guest.over(run.limits if run is not None else LimitsSection())
    for stop in (signal.SIGINT, signal.SIGTERM):  # until the daemon handles them
        signal.signal(stop, _stop_early)
    classes = _roles(flags.roles, run)
    limits = settled(limits, [cls.name for cls in classes])
    run = structs.replace(run, limits=limits) if run is not None else None
    obey(limits)  # before torch or trio start threads, which inherit the limits
    if loaded is not None:
        _tell_of_files(loaded, any(cls.needs_run for cls in classes))
        _check_run(classes, loaded.run)
    if flags.device != "cpu":
        from peerd.model.devices import describe

        describe(flags.device)

    import trio

    from peerd.cli.doctor.idle_gpu import idle_gpu
    from peerd.daemon import daemon, launch
    from peerd.daemon.control import company

    if (hint := idle_gpu(flags.device)) and set(flags.roles) - {"backbone", "aux"}:
        typer.echo(f"peerd: {hint}", err=True)

    plan = daemon.DaemonPlan(
        roles=classes,
        run=run,
        bootstrap=_chosen(flags.bootstrap, run.bootstrap if run is not None else []),
        listen=_chosen(flags.listen, _own_listen(loaded, flags.roles)),
        announced=_chosen(flags.announce, run.announce if run is not None else []),
        data_dir=flags.data_dir or home_of(run, [cls.name for cls in classes]),
        run_file=str(flags.file or "run.yaml"),
        device=flags.device,
        seed=flags.seed,
        log_level=flags.log_level,
        company=company.CompanyConfig(alone=flags.alone),
        limits=limits,
    )
    try:
        trio.run(launch.main, plan)
    except ExceptionGroup as group:
        raise daemon.leaf(group) from group


def _load(
    file: Path | None, bootstrap: list[str] | None, listen: list[str] | None, announce: list[str] | None
) -> LoadedRun | None:
    from peerd.run import config

    config.check_addresses("--bootstrap", bootstrap or [])
    config.check_addresses("--listen", listen or [])
    config.check_addresses("--announce", announce or [])
    return config.load_run(file) if file is not None else None


def _tell_of_files(loaded: LoadedRun, takes_part: bool) -> None:
    """Warn about files that cannot be compared between peers. Raises ConfigError if this peer takes part in the run."""
    if loaded.unknown and takes_part:
        raise ConfigError(f"{loaded.path}: {'; '.join(loaded.unknown)}")
    for text in loaded.unknown:
        typer.echo(f"peerd: {loaded.path}: {text}; until then no checkpoints of this run are kept", err=True)
    for text in loaded.notes:
        typer.echo(f"peerd: {text}", err=True)


def _check_run(classes: Sequence[type[Role]], run: RunFile) -> None:
    """Let each role check the text and the code that the run file names. Raises ConfigError before anything starts."""
    from peerd.role.role import ChecksRun

    computing = [cls.name for cls in classes if cls.name in ("stage", "trainer", "expert")]
    if run.loop is not None and computing:
        raise ConfigError(
            f"role {computing[0]} cannot serve run {run.run}, whose model is in its users' own loops; allowed: aux, "
            "backbone; to train, run the script that has its peerd.AveragingOptimizer"
        )
    for cls in classes:
        if isinstance(cls, ChecksRun):
            cls.check_run(run)


def _own_listen(loaded: LoadedRun | None, roles: list[str]) -> Sequence[str]:
    """Listen addresses of the run file, or defaults without one. A backbone's default is a fixed port."""
    if roles == ["backbone"] and (loaded is None or "listen" not in loaded.given):
        return BACKBONE_LISTEN
    return loaded.run.listen if loaded is not None else ANY_PORT


def _chosen(given: list[str] | None, otherwise: Sequence[str]) -> tuple[str, ...]:
    return tuple(given or otherwise)


def _roles(texts: list[str], run: RunFile | None) -> tuple[type[Role], ...]:
    from peerd.daemon import registry

    own = {text: registry.load(text) for text in sorted(texts, key=lambda text: ":" in text)}  # the user's code last
    classes = [own[text] for text in texts]
    names = [cls.name for cls in classes]
    twice = sorted({name for name in names if names.count(name) > 1})
    if twice:
        raise ConfigError(f"role {twice[0]} is given twice; a peer can have each role only once")
    lacking = [cls.name for cls in classes if cls.needs_run and run is None]
    if lacking:
        raise ConfigError(f"role {lacking[0]} needs a run file: add --model FILE")
    return tuple(classes)


def _device(name: str) -> str:
    if not re.fullmatch(r"cpu|mps|cuda(:\d+)?", name):
        raise ConfigError(f"--device {name!r} is unknown; allowed: cpu, cuda, cuda:N, mps")
    return name


def home_of(run: RunFile | None, roles: list[str]) -> Path:
    """The default data directory of a run or of roles."""
    from peerd.run.home import data_root, default_data_dir, run_data_dir

    if run is not None:
        return run_data_dir(run.run, roles)
    return default_data_dir(None, roles) if roles else data_root()


def _stop_early(number: int, frame: FrameType | None) -> NoReturn:
    """Handler of Ctrl+C during imports: exits at once, since nothing has started that needs cleanup."""
    os._exit(0)


def invoke(argv: list[str]) -> int:
    """Run one command line in this process. Messages go to stderr. Returns the exit code."""
    command = typer.main.get_command(app)
    try:
        try:
            command.main(args=argv, prog_name="peerd")
        finally:
            with contextlib.suppress(BrokenPipeError, ValueError):  # the reader has exited
                sys.stdout.flush()
    except SystemExit as end:
        return end.code if isinstance(end.code, int) else 0 if end.code is None else 1
    except PeerdError as error:
        sys.stderr.write(f"peerd: {error}\n")
        return 2 if isinstance(error, ConfigError) else 1
    except ModuleNotFoundError as error:
        if (error.name or "peerd").partition(".")[0] in ("peerd", "roles"):
            raise
        sys.stderr.write(f"peerd: this needs {missing_package(error)}\n")
        return 2
    except OSError as error:
        if error.errno not in (errno.ENOSPC, errno.EDQUOT):
            raise
        what = f": {error.filename} can't be written" if error.filename else ""
        sys.stderr.write(
            f"peerd: the disk is full{what}; make room in the data directory, or choose another --data-dir\n"
        )
        return 1
    return 0


def _crash(kind: type[BaseException], error: BaseException, trace: TracebackType | None) -> None:
    """Exception hook: prints one line for the user and writes the traceback to a file for a bug report."""
    where = "no file could be written"
    with contextlib.suppress(OSError):
        descriptor, where = tempfile.mkstemp(prefix="peerd-failure-", suffix=".txt")
        with os.fdopen(descriptor, "w", encoding="utf-8") as file:
            traceback.print_exception(kind, error, trace, file=file)
    sys.stderr.write(f"peerd: stopped by a bug ({kind.__name__}: {error}); please report it, details: {where}\n")


def main() -> None:
    """The `peerd` command."""
    sys.excepthook = _crash
    if "PEERD_PARENT" in os.environ:
        from peerd.cli.demo import tether

        tether.tie()
    _end(invoke(sys.argv[1:]))


def _end(code: int) -> NoReturn:
    """Exit. Skips Python's cleanup if torch is loaded, whose exit may wait 10 s for its threads, or abort."""
    if "torch" in sys.modules:
        os._exit(code)  # `invoke` has flushed what was printed
    sys.exit(code)

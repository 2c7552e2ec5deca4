"""The line is safe: whatever a stranger's run file says, a run that is joined by it stays within the allow-list.

A run file is published by a hostile backbone and joined by the whole command line; what would be used is then used:
its text is read, its model is outlined, its checkpoint is written. Drawn are all keys of the schema at their edges.
"""

from __future__ import annotations

import contextlib
import ipaddress
import itertools
import socket
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any, Literal, get_args, get_origin

import msgspec
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from peerd.cli import joining
from peerd.cli.cli import invoke
from peerd.core.errors import PeerdError
from peerd.core.keys import Keypair
from peerd.daemon import launch, registry
from peerd.daemon.daemon import DaemonPlan
from peerd.data.stream import cache_of, samples_of
from peerd.messages.run_link import JoinLink, RunFileAnswer
from peerd.messages.token import Token, seal, to_text
from peerd.model.checkpoint import Checkpoints
from peerd.model.run_record import write_record
from peerd.model.stage.footprint import footprint
from peerd.run.check_line import LINE_BYTES, LINE_RULES, Between, Rule
from peerd.run.public_ip import is_public
from peerd.run.runfile import RunFile, disk_bytes, fingerprint, sources_of
from tests.kit.line_runs import INSTALLED, Home, watch
from tests.kit.runs import changed

LINK = JoinLink("198.51.100.7", 31337, Keypair.from_seed(b"a" * 32).peer_id, "r")
PUBLIC, PRIVATE = "public.example", "private.example"  # names, as the user's name server has them
TEXTS = [
    *("", "stdlib", "bytes", "gpt", "ffn", "text", "any", "0" * 64, "x" * 300, "\x1b[2J", "é", "1e3", "null", "- a"),
    *(f"{INSTALLED}:docs", f"{INSTALLED}:build", "mine:docs", "mine.py:build", "../work/mine:docs", "os:system"),
    *("subprocess:getoutput", "builtins:eval", "os.path:join", ":", "a:", ":a", "/abs.py:f", "~/x:y"),
    *(".env", "notes.txt", ".ssh/id", "texts", "*", "**/*", ".*", "../*", "/etc/passwd", "~", "~/.ssh", "tok.json"),
    *("stdlib,notes.txt", "notes.txt,stdlib", "file:///etc/passwd", "ftp://a.example/", "//a.example/x", "HTTPS://x/"),
    *(f"https://{PUBLIC}/x", f"https://{PRIVATE}/x", f"http://{PUBLIC}/x", f"http://{PRIVATE}/x", "https://"),
    *(
        "https://127.0.0.1/",
        "https://10.1.2.3/",
        "https://169.254.169.254/latest",
        "https://[::1]/",
        "https://[fe80::1]",
    ),
    *("https://[::ffff:10.0.0.1]/", "https://[64:ff9b::7f00:1]/", "https://[fd00::1]/", "https://100.64.0.1/"),
    *("https://localhost/", "https://router/", "https://2130706433/", "https://0x7f.1/", "https://127.1/"),
    *("https://224.0.0.1/", "https://0.0.0.0/", "https://u@public.example/", "https://public.example:0/", "https://[/"),
]
NUMBERS = [0, -1, 10**9, 1 << 63, 0.5, 1e300]  # beside the edges of each rule


def leaves(cls: type[msgspec.Struct] = RunFile, path: str = "") -> Iterator[tuple[str, Any]]:
    """Every key of the schema, as LINE_RULES has it, with its type."""
    for field in msgspec.structs.fields(cls):
        kinds = [kind for kind in (get_args(field.type) or (field.type,)) if isinstance(kind, type)]
        section = next((kind for kind in kinds if issubclass(kind, msgspec.Struct)), None)
        if section is None:
            yield f"{path}{field.name}", field.type
            continue
        listed = get_origin(field.type) is list
        yield from leaves(section, f"{path}{field.name}{'[]' if listed else ''}.")


KEYS = dict(leaves())


def edges(key: str) -> list[Any]:
    """Values of one key at and beyond its edges, right and wrong by type."""
    kind, rule = KEYS[key], LINE_RULES[key]
    if get_origin(kind) is Literal:
        return [*get_args(kind), "no such"]
    if kind is bool:
        return [True, False]
    if isinstance(rule, Between):
        numbers = [*NUMBERS, rule.least, rule.most, rule.least - 1, rule.most + 1]
        whole = [int(number) if number == int(number) else number for number in numbers]
        return whole if kind in (int, float) else [[], [2, 2], *([number] for number in whole), [1] * 99]
    if kind is str:
        return TEXTS if rule in (Rule.CODE, Rule.DATA, Rule.TOKENIZER) else TEXTS[::6]
    return [None, [], ["/ip4/10.0.0.1/tcp/22"], [1], True, 0, 1]


def planted(values: dict[str, Any]) -> dict[str, Any]:
    """The tree of a run file with these values."""
    tree: dict[str, Any] = {"run": "r"}
    for key, value in values.items():
        *sections, last = key.split(".")
        at: Any = tree
        for section in sections:
            name = section.removesuffix("[]")
            if section.endswith("[]"):
                entries = at.setdefault(name, [{"path": "stdlib"} if name == "sources" else {}])
                at = entries[0]
            else:
                at = at.setdefault(name, {})
        at[last] = value
    return tree


class Volunteer:
    """Joins by a stranger's line, and does what the run would do."""

    def __init__(self, home: Home, patch: pytest.MonkeyPatch) -> None:
        self.home, self._told, self.plans = home, RunFileAnswer(b"", b""), list[DaemonPlan]()
        self.dialed: list[str] = []

        async def fetched(*_: object) -> RunFileAnswer:
            return self._told

        async def planned(plan: DaemonPlan) -> None:
            self.plans.append(plan)

        def resolved(host: str, port: int, **_: object) -> list[Any]:
            address = {PUBLIC: "9.9.9.9", PRIVATE: "10.0.0.5"}.get(host, host)
            return [(socket.AF_INET, socket.SOCK_STREAM, 6, "", (address, port))]

        def dial(place: tuple[str, int], *_: object, **__: object) -> socket.socket:
            self.dialed.append(place[0])
            raise ConnectionRefusedError("nobody is there")

        patch.setattr(joining, "fetch_file", fetched)
        patch.setattr(launch, "main", planned)
        patch.setattr(registry, "refuse_foreign", lambda point: None)
        patch.setattr(socket, "getaddrinfo", resolved)
        patch.setattr(socket, "create_connection", dial)
        patch.setattr("peerd.data.files.http_fetch.PAUSES_S", ())
        patch.setattr("peerd.cli.cli.obey", lambda limits: None)
        patch.setattr("signal.signal", lambda *_: None)
        patch.setenv("XDG_CACHE_HOME", str(home.data / "cache"))
        patch.setenv("XDG_RUNTIME_DIR", str(home.data))
        for name in ("https_proxy", "HTTPS_PROXY", "all_proxy", "ALL_PROXY"):
            patch.delenv(name, raising=False)
        patch.syspath_prepend(str(home.modules))
        patch.chdir(home.work)

    def join(self, tree: dict[str, Any], *flags: str) -> RunFile | None:
        """The run file that is used in the end, and used; None if the line was refused, with exit code 2."""
        text = msgspec.json.encode(tree)
        self._told = RunFileAnswer(text, b"")
        self.plans.clear()
        (self.home.data / "run.yaml").unlink(missing_ok=True)
        code = invoke(["join", LINK.text, "--yes", "--role", "trainer", "--data-dir", str(self.home.data), *flags])
        assert code == (0 if self.plans else 2)
        if not self.plans:
            return None
        run = self.plans[0].run
        assert run is not None
        self._use(run)
        return run

    def _use(self, run: RunFile) -> None:
        few = run.model.context <= 1024 and run.data.shuffle_buffer <= 100_000
        for split in ("train", "valid") if few else ():
            with contextlib.suppress(PeerdError):
                samples_of(run, "me", split).take(1)  # type: ignore[arg-type]
        cache_of(run)
        if run.model.kind == "gpt" and run.model.layers <= 64:
            footprint(run, 0)
        place = self.home.data / "trainer" / "checkpoints" / run.run
        write_record(place, run, fingerprint(run))
        Checkpoints(place / "stage-0", run.checkpoint.keep, fingerprint(run), 0, disk_bytes(run)).save(
            1, {"w": torch.zeros(2)}
        )


@pytest.fixture
def volunteer(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Volunteer:
    return Volunteer(Home(tmp_path), monkeypatch)


def check_used(run: RunFile, volunteer: Volunteer) -> None:
    """What is used is bounded, and nobody but public hosts was dialed."""
    assert run.line is not None
    assert run.limits == msgspec.structs.replace(RunFile(run="r").limits, nice=10)
    assert run.model.kind == "gpt"
    assert run.model.vocab == "bytes"
    for _, source in sources_of(run.data):
        assert source.kind != "dataset"
        assert source.path in ("", "stdlib") or source.path.startswith("https://")
    assert run.checkpoint.keep <= 64
    assert disk_bytes(run) == 50 * 10**9
    assert run.data.shuffle_buffer * run.model.context <= LINE_BYTES
    assert run.pipeline.microbatch * run.model.context * run.model.d_model <= LINE_BYTES
    assert all(is_public(ipaddress.ip_address(text)) for text in volunteer.dialed)


def test_every_key_of_the_schema_has_a_rule_that_fits_its_type() -> None:
    assert LINE_RULES.keys() == KEYS.keys()
    for key, kind in KEYS.items():
        rule = LINE_RULES[key]
        if rule is Rule.OWN:
            continue
        is_choice, is_number = kind is bool or get_origin(kind) is Literal, kind in (int, float, list[int])
        assert (rule is Rule.CHOICE) == is_choice, key
        assert isinstance(rule, Between) == is_number, key
    for key, default in (("limits.threads", 0), ("access.token", ""), ("bootstrap", []), ("line.data", "")):
        assert LINE_RULES[key] is Rule.OWN, (key, default)


@pytest.mark.slow
@pytest.mark.thorough
@pytest.mark.parametrize("key", sorted(LINE_RULES))
def test_each_key_at_each_edge_stays_within_the_allow_list(key: str, volunteer: Volunteer) -> None:
    volunteer.join({"run": "r"})  # whatever is loaded once
    allowed = volunteer.home.allowed([])
    for value in edges(key):
        volunteer.dialed.clear()
        with watch() as events:
            run = volunteer.join(planted({key: value}))
        assert allowed.faults(events) == [], value
        if run is not None:
            check_used(run, volunteer)
            assert LINE_RULES[key] is not Rule.OWN or run == volunteer.join({"run": "r"}), value


@st.composite
def run_files(draw: st.DrawFn) -> dict[str, Any]:
    """Run files with a few keys at edges."""
    keys = draw(st.lists(st.sampled_from(sorted(LINE_RULES)), min_size=1, max_size=4, unique=True))
    values = {key: draw(st.sampled_from(edges(key))) for key in keys}
    if draw(st.booleans()):  # the text's keys are those that go together
        data = {key: draw(st.sampled_from(edges(key))) for key in ("data.path", "data.kind")}
        values |= data if draw(st.booleans()) else {f"data.sources[].{key[5:]}": data[key] for key in data}
    tree = planted(values)
    if draw(st.booleans()):
        tree.setdefault("data", {}).setdefault("sources", [])
    return tree


def hostile_files() -> Iterator[dict[str, Any]]:
    """What a stranger would write first: each hostile text as the text of the run, in both places, and as the rest."""
    texts = (f"{INSTALLED}:docs", "mine:docs", ".env", "*", f"https://{PRIVATE}/x", f"http://{PUBLIC}/x")
    for text, kind in itertools.product(texts, ("text", "dataset")):
        yield planted({"data.path": text, "data.kind": kind}) | {"seed": 1}
        yield planted({"data.sources[].path": text, "data.sources[].kind": kind})
        tree = planted({"data.path": text, "data.kind": kind})
        tree["data"]["sources"] = []
        yield tree
    for key, text in itertools.product(("model.kind", "experts.block", "model.vocab"), (*texts, "tok.json")):
        yield planted({key: text})
    for key in ("checkpoint.keep", "evaluate.samples", "data.shuffle_buffer", "pipeline.microbatch", "limits.disk_gb"):
        yield planted({key: 1 << 30})


@pytest.mark.slow
def test_a_line_run_stays_within_the_allow_list(volunteer: Volunteer) -> None:
    used = itertools.count()
    assert volunteer.join({"run": "r"}) is not None
    allowed = volunteer.home.allowed([])

    def try_it(tree: dict[str, Any]) -> None:
        volunteer.dialed.clear()
        with watch() as events:
            run = volunteer.join(tree)
        assert allowed.faults(events) == []
        if run is not None:
            check_used(run, volunteer)
            next(used)

    for tree in hostile_files():
        try_it(tree)
    given(run_files())(try_it)()
    assert next(used) > 0
    assert INSTALLED not in sys.modules


def test_the_allow_list_notices_what_a_run_file_of_ones_own_may_do(volunteer: Volunteer) -> None:
    run = RunFile(run="r", data=msgspec.convert({"path": "notes.txt", "holdout": 0.0}, type(RunFile(run="r").data)))
    for path, kind in (("notes.txt", "text"), (f"{INSTALLED}:docs", "dataset")):
        with watch() as events:
            samples_of(changed(run, data={"path": path, "kind": kind}), "me").take(1)
        assert volunteer.home.allowed([]).faults(events) != []
    sys.modules.pop(INSTALLED, None)


def test_what_the_user_allows_is_used_and_nothing_beside_it(volunteer: Volunteer) -> None:
    volunteer.join({"run": "r"})
    tree: dict[str, Any] = {"run": "r", "data": {"path": "anything/*.txt"}}
    with watch() as events:
        run = volunteer.join(tree, "--data", "texts")
    assert run is not None
    assert run.data.path == "texts"
    assert volunteer.home.allowed(["texts"]).faults(events) == []
    assert volunteer.home.allowed([]).faults(events) != []
    tree = {"run": "r", "data": {"path": "mine:docs", "kind": "dataset"}}
    with watch() as events:
        run = volunteer.join(tree, "--allow-code", "mine.py")
    assert run is not None
    assert volunteer.home.allowed(["mine.py"]).faults(events) == []
    assert (
        volunteer.join(tree | {"data": {"path": f"{INSTALLED}:docs", "kind": "dataset"}}, "--allow-code", "mine.py")
        is None
    )


def test_a_disk_bound_of_the_users_own_wins(volunteer: Volunteer) -> None:
    volunteer.join({"run": "r", "checkpoint": {"keep": 64}}, "--disk-gb", "7")
    (plan,) = volunteer.plans
    assert plan.run is not None
    assert disk_bytes(plan.run) == 7 * 10**9


@pytest.mark.parametrize("command", ["doctor", "plan"])
def test_other_commands_check_a_kept_run_file_alike(
    command: str, volunteer: Volunteer, capsys: pytest.CaptureFixture[str]
) -> None:
    assert volunteer.join({"run": "r"}) is not None
    file = volunteer.home.data / "run.yaml"
    file.write_text(
        file.read_text() + f"data: {{kind: dataset, path: '{INSTALLED}:docs'}}\ncheckpoint: {{keep: 1000}}\n"
    )
    with watch() as events:
        assert invoke([command, "--model", str(file)]) == 2
    assert volunteer.home.allowed([]).faults(events) == []
    said = capsys.readouterr().err
    assert "data.path is 'decoy_installed:docs': code" in said
    assert "checkpoint.keep is 1000; allowed by a join link: 1 to 64" in said


def test_a_stripped_signature_is_refused_by_whoever_has_a_token(
    volunteer: Volunteer, capsys: pytest.CaptureFixture[str]
) -> None:
    organizer = Keypair.from_seed(b"o" * 32)
    token = Token(bytes(8), LINK.peer.public_key, "r", "Ann", ["trainer"], 1_700_000_000, 9_900_000_000)
    assert volunteer.join({"run": "r"}, "--token", to_text(Token, seal(token, organizer))) is None
    assert (
        "access.organizer is missing, and the run file is not signed; allowed with a token" in capsys.readouterr().err
    )

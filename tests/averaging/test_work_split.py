"""The division of a round: from what peers say to an order that every member takes."""

from __future__ import annotations

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from peerd.averaging.allreduce_round import AveragingPlan
from peerd.averaging.shares import NoSplit
from peerd.averaging.work_split import Split, WorkSplitter
from peerd.core.limits import LINE_BYTES_PER_S_MIN, LINE_PAIRS_GROUP
from peerd.messages.encoding import decode, encode
from peerd.messages.swarm import LineInfo, Mbs, Prepare

GROUP = ("a", "b", "c")
MB = 1e6


def lines(**said: LineInfo) -> WorkSplitter:
    found = WorkSplitter()
    for peer, line in said.items():
        found.tell(peer, 0, line)
    return found


def node(rate: float = 0.0, mode: str = "node", **more: object) -> LineInfo:
    known = LineInfo(mode, rate, rate, 1_000_000, "float32")  # type: ignore[arg-type]
    return msgspec.structs.replace(known, **more)


def shares(split: Split | None) -> dict[str, float]:
    assert split is not None
    return {party.peer: party.share for party in split.parties}


def test_where_nobody_says_anything_shares_are_equal() -> None:
    assert WorkSplitter().split(0, GROUP) is None
    assert lines(a=node(), b=node()).split(0, GROUP) is None
    assert lines(a=node(MB)).split(0, ("a",)) is None


def test_a_wider_line_sums_more_and_the_silent_count_as_the_mean() -> None:
    found = shares(lines(a=node(1.4 * MB), b=node(MB)).split(0, GROUP))
    assert found["a"] > found["c"] > found["b"]


def test_helpers_of_the_stage_sum_and_those_of_others_do_not() -> None:
    known = lines(a=node(MB), b=node(MB), c=node(MB), helper=node(10 * MB, "aux"))
    known.tell("other", 1, node(10 * MB, "aux"))
    split = known.split(0, GROUP)
    assert shares(split) == {"a": 0.0, "b": 0.0, "c": 0.0, "helper": 1.0}
    assert split is not None
    assert (split.elements, split.dtype) == (1_000_000, "float32")
    assert [helper.peer for helper in known.helpers()] == ["helper", "other"]


@pytest.mark.parametrize("odd", [{"elements": 999}, {"dtype": "float64"}, {"elements": 0}, {"further": 7}])
def test_helpers_are_left_alone_when_members_do_not_agree_on_the_vector(odd: dict[str, object]) -> None:
    known = lines(a=node(MB), b=node(MB), c=node(MB, **odd), helper=node(10 * MB, "aux"))
    assert "helper" not in shares(known.split(0, GROUP))


def test_helpers_hear_of_the_second_sum_that_all_members_bring() -> None:
    known = lines(a=node(MB, further=70), b=node(MB, further=70), c=node(MB, further=70), helper=node(10 * MB, "aux"))
    split = known.split(0, GROUP)
    assert split is not None
    assert "helper" in shares(split)
    assert (split.elements, split.further) == (1_000_000, 70)


def test_helpers_without_work_are_left_out() -> None:
    assert "helper" not in shares(lines(a=node(9 * MB), b=node(9 * MB), helper=node(1.0, "aux")).split(0, ("a", "b")))


def test_helpers_that_would_sum_next_to_nothing_are_left_out() -> None:
    members = {name: node(MB) for name in "abcd"}
    narrow, wide = node(0.01 * MB, "aux"), node(2 * MB, "aux")
    assert shares(lines(**members, narrow=narrow).split(0, tuple("abcd"))) == pytest.approx(dict.fromkeys("abcd", 0.25))
    assert shares(lines(**members, narrow=narrow, wide=wide).split(0, tuple("abcd"))).keys() == {*"abcd", "wide"}
    pairs = lines(**members, narrow=narrow)
    pairs.limit_pairs({("a", "b"): 1e4})
    assert "narrow" in shares(pairs.split(0, tuple("abcd"))), "the linear programme may need it"
    many = lines(**members, **{f"narrow{number}": narrow for number in range(40)})
    helping = shares(many.split(0, tuple("abcd"))).keys() - set("abcd")
    assert 30 < len(helping) < 40, "together they do more than that"


def test_clients_alone_cannot_average() -> None:
    with pytest.raises(NoSplit):
        lines(a=node(MB, "client"), b=node(MB, "client")).split(0, ("a", "b"))


def test_a_peer_that_says_it_helps_no_longer_is_no_helper() -> None:
    known = WorkSplitter()
    assert known.tell("h", 0, node(MB, "aux"), ("/ip4/10.0.0.1/tcp/1",))
    assert not known.tell("h", 0, node(2 * MB, "aux"), ("/ip4/10.0.0.1/tcp/1",))  # its line only
    assert known.tell("h", 0, node(MB, "aux"), ("/ip4/10.0.0.2/tcp/1",))
    assert known.tell("h", 0, node(MB))
    assert not known.helpers()
    assert not known.forget("h")


def test_parts_are_small_where_lines_are_slow_and_where_the_vector_is_small() -> None:
    def part_bytes(rate: float, elements: int) -> int:
        split = lines(**{p: node(rate, elements=elements) for p in GROUP}).split(0, GROUP)
        assert split is not None
        return split.part_bytes

    assert part_bytes(1e9, 1_000_000_000) == 4 << 20
    assert part_bytes(1e9, 12_000_000) == 187_500  # an eighth of 48 MB for eight owners with four parts each
    assert part_bytes(1 * MB, 1_000_000_000) == 46_875  # two seconds of 1 MB/s, with 4/3 of the vector on each line
    assert part_bytes(1e4, 1_000_000_000) == 16 << 10
    assert part_bytes(10 * MB, 500_000) == 41_666, "three owners: one part for each is a sixteenth"
    assert part_bytes(10 * MB, 1_000_000) == 64 << 10


def test_a_round_is_sent_evenly_only_where_all_lines_are_stated() -> None:
    def pace(**changed: object) -> float:
        split = lines(a=node(MB), b=node(MB), c=node(MB, **changed)).split(0, GROUP)
        assert split is not None
        return split.s_per_byte

    assert pace() == pytest.approx(4 / 3 / MB)
    assert pace(up_measured=True) == pace(down_measured=True) == pace(up_bytes_per_s=0.0) == 0
    slow = lines(a=node(900.0), b=node(900.0), c=node(900.0)).split(0, GROUP)
    assert slow is not None
    assert slow.s_per_byte == 0, "nobody measures milliseconds of a line that takes so long"


def test_limits_between_pairs_are_collected_and_solved() -> None:
    known = lines(a=node(MB), b=node(MB), c=node(MB / 4))
    before, changes = known.split(0, GROUP), known.changes
    limits = {("a", "b"): 1e4, ("b", "c"): 0.2 * MB, ("a", "stranger"): 1.0, ("c", "a"): 1e-9}
    known.limit_pairs(limits)
    assert known.changes == changes + 1
    split = known.split(0, GROUP)
    assert before is not None
    assert split is not None
    assert before.pairs == ()
    assert dict(split.pairs) == {("a", "b"): 1e4, ("c", "a"): LINE_BYTES_PER_S_MIN}, "c's line alone is as narrow"
    known.limit_pairs(dict(limits))
    assert known.changes == changes + 1
    assert known.split(0, GROUP) is split
    known.limit_pairs({})
    assert known.split(0, GROUP) == before


@pytest.mark.slow  # scipy takes half a second to import
def test_a_narrow_pair_moves_the_work() -> None:
    known = lines(a=node(MB), b=node(MB), c=node(MB))
    known.limit_pairs({("a", "b"): 1e4})
    split = known.split(0, GROUP)
    assert split is not None
    within = shares(split.within_pairs())
    assert within["c"] > 0.95
    assert sum(within.values()) == pytest.approx(1)


rates = st.one_of(st.floats(), st.floats(0, 1e12))
infos = st.builds(
    LineInfo,
    st.sampled_from(("node", "client", "aux")),
    rates,
    rates,
    st.sampled_from((0, 5000)),
    st.sampled_from(("float32", "float64", "nonsense")),
)


def test_limits_between_pairs_do_not_count_in_large_groups() -> None:
    group = tuple(f"p{number:03}" for number in range(LINE_PAIRS_GROUP + 1))
    known = lines(**dict.fromkeys(group, node(MB)))
    known.limit_pairs({group[:2]: 1e4})  # type: ignore[dict-item]
    small, large = known.split(0, group[:-1]), known.split(0, group)
    assert small is not None
    assert large is not None
    assert (len(small.pairs), large.pairs) == (1, ())


narrow = st.dictionaries(
    st.tuples(st.sampled_from("abcdefgh"), st.sampled_from("abcdefgh")), st.floats(1e-9, 125e9), max_size=8
)


@given(st.dictionaries(st.sampled_from("abcdefgh"), infos), st.integers(2, 6), narrow)
def test_whatever_is_said_the_order_is_one_that_members_take(
    said: dict[str, LineInfo], members: int, pairs: dict[tuple[str, str], float]
) -> None:
    group = tuple("abcdefgh"[:members])
    known = lines(**{p: i for p, i in said.items() if p not in group or i.mode != "aux"})
    known.limit_pairs(pairs)
    try:
        split = known.split(0, group)
    except NoSplit:
        clients = [p for p in group if p in said and said[p].mode == "client"]
        assert len(clients) == len(group)
        return
    if split is None:
        return
    order = Prepare(bytes(16), 1, 5, bytes(16), b"", list(group), Mbs(), 8, 60.0)
    order = msgspec.structs.replace(
        order,
        split=list(split.parties),
        part_bytes=split.part_bytes,
        elements=split.elements,
        dtype=split.dtype,
    )
    plan = AveragingPlan.of(decode(Prepare, encode(order)), 1 << 20, 3.0)
    assert plan.senders == group
    assert sum(p.end - p.begin for p in plan.parts(5000, 4)) == 5000

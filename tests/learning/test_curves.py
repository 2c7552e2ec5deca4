"""Pictures of curves are well-formed, and show what they are given."""

from __future__ import annotations

from xml.etree import ElementTree

from scripts.learning.curves import Line, svg

SVG = "{http://www.w3.org/2000/svg}"


def test_a_picture_is_well_formed_and_has_a_line_for_each_curve() -> None:
    lines = [Line("a < b", [1, 2, 3], [[1.0, 2.0, 3.0], [1.0, 4.0, 5.0]]), Line("flat", [1, 3], [[2.0, 2.0]], True, 1)]
    root = ElementTree.fromstring(svg("one & two", ("x", "y"), lines))
    found = root.findall(f"{SVG}polyline")
    assert len(found) == 2
    ys = [float(point.split(",")[1]) for point in found[0].attrib["points"].split()]
    assert ys == sorted(ys, reverse=True)  # it rises
    assert "a < b" in [text.text for text in root.findall(f"{SVG}text")]


def test_a_picture_of_one_value_does_not_divide_by_zero() -> None:
    root = ElementTree.fromstring(svg("t", ("x", "y"), [Line("a", [1.0], [[2.0]])]))
    assert "nan" not in ElementTree.tostring(root, "unicode")
    assert root.find(f"{SVG}polyline") is not None


def test_values_below_the_bottom_stay_in_the_picture() -> None:
    root = ElementTree.fromstring(svg("t", ("x", "y"), [Line("a", [1, 2], [[0.0, 9.0]])], bottom=5.0))
    line = root.find(f"{SVG}polyline")
    assert line is not None
    assert all(0 <= float(point.split(",")[1]) <= 420 for point in line.attrib["points"].split())


def test_the_legend_is_above_curves_that_fall_and_below_those_that_rise() -> None:
    def legend_y(*values: float) -> float:
        root = ElementTree.fromstring(svg("t", ("x", "y"), [Line("a", [1.0, 2.0], [list(values)])]))
        return next(
            float(text.attrib["y"]) for text in root.iter("{http://www.w3.org/2000/svg}text") if text.text == "a"
        )

    assert legend_y(9.0, 1.0) < 100
    assert legend_y(1.0, 9.0) > 300

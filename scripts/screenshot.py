"""Takes a picture of a program's screen: runs the program in a terminal of a given size and draws its screen to a PNG.

    python -m scripts.screenshot OUT.png --size 80x24 --when "killed stage" --after 8 -- peerd demo --steps 60

Needs Pillow and a monospaced font. peerd itself does not, so the pictures of README.md are in the repository. With
OUT.txt, only the text is written.
"""

from __future__ import annotations

import argparse
import importlib
from collections.abc import Iterator
from pathlib import Path
from typing import Any, Final, NamedTuple

from tests.worlds.processes.terminal import Grid, terminal

Colour = tuple[int, int, int]

FONT: Final = "/usr/share/fonts/truetype/dejavu/DejaVuSansMono{}.ttf"
SIZE: Final = 15  # of a character, in points
CELL: Final = (9, 19)  # width and height of a character, in pixels
MARGIN: Final = 10
GROUND, INK, DIM = (24, 26, 31), (222, 222, 222), (135, 139, 148)
COLOURS: Final = {31: (240, 98, 98), 32: (120, 200, 120), 33: (230, 192, 90), 36: (86, 190, 210)}
HALVES: Final = {
    "▀": (0, CELL[1] // 2 - 1),
    "▄": (CELL[1] // 2, CELL[1] - 1),
    "█": (0, CELL[1] - 1),
}  # first, last line
BRAILLE: Final = ((0x01, 0x08), (0x02, 0x10), (0x04, 0x20), (0x40, 0x80))  # bits by row and column


class Look(NamedTuple):
    """Colours and weight of a character."""

    ink: Colour
    ground: Colour
    heavy: bool


def look(style: str) -> Look:
    """The look of a terminal style (SGR), such as "1;31". The last colour of each kind counts."""
    numbers = iter([int(number) for number in style.split(";") if number])
    ink, ground, heavy, dim = INK, GROUND, False, False
    for number in numbers:
        if number in (38, 48):
            found = _of_many(numbers)
            ink, ground = (found, ground) if number == 38 else (ink, found)
        else:
            ink = COLOURS.get(number, ink)
            heavy, dim = heavy or number == 1, dim or number == 2
    return Look(DIM if dim and ink == INK else ink, ground, heavy)


def _of_many(numbers: Iterator[int]) -> Colour:
    """Read a 24-bit colour, or one of the 256 colours of terminals: 16 basic ones, a 6 x 6 x 6 cube, and greys."""
    if next(numbers) == 2:
        return next(numbers), next(numbers), next(numbers)
    number = next(numbers)
    if number < 16:
        return COLOURS.get(30 + number % 8, INK)
    if number >= 232:
        return (8 + 10 * (number - 232),) * 3
    steps = (0, 95, 135, 175, 215, 255)
    return steps[(number - 16) // 36], steps[(number - 16) // 6 % 6], steps[(number - 16) % 6]


def draw(grid: Grid, out: Path) -> None:
    """Draw the screen to a PNG with few colours."""
    image_module: Any = importlib.import_module("PIL.Image")
    drawing: Any = importlib.import_module("PIL.ImageDraw")
    fonts: Any = importlib.import_module("PIL.ImageFont")
    plain, bold = (fonts.truetype(FONT.format(kind), SIZE) for kind in ("", "-Bold"))
    size = tuple(count * cell + 2 * MARGIN for count, cell in zip((grid.columns, grid.lines), CELL, strict=True))
    image = image_module.new("RGB", size, GROUND)
    pen = drawing.Draw(image)
    for row, cells in enumerate(grid.cells):
        for column, char in enumerate(cells):
            x, y = MARGIN + column * CELL[0], MARGIN + row * CELL[1]
            colour, ground, heavy = look(grid.styles[row][column])
            if ground != GROUND:
                pen.rectangle((x, y, x + CELL[0] - 1, y + CELL[1] - 1), fill=ground)
            if 0x2800 <= ord(char) <= 0x28FF:
                for line, bits in enumerate(BRAILLE):
                    for side, bit in enumerate(bits):
                        if (ord(char) - 0x2800) & bit:
                            left, top = x + 1 + side * 4, y + 2 + line * 4
                            pen.rectangle((left, top, left + 2, top + 2), fill=colour)
            elif char in HALVES:
                top, bottom = HALVES[char]
                pen.rectangle((x, y + top, x + CELL[0] - 1, y + bottom), fill=colour)
            elif char != " ":
                pen.text((x, y), char, font=bold if heavy else plain, fill=colour)
    image.quantize(160).save(out, optimize=True)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("out", type=Path)
    parser.add_argument("--size", default="80x24", help="columns x lines")
    parser.add_argument("--when", default="", help="text to wait for")
    parser.add_argument("--after", type=float, default=1.0, help="seconds after that")
    parser.add_argument("--timeout", type=float, default=300.0)
    parser.add_argument("command", nargs="+")
    wish = parser.parse_args()
    columns, lines = map(int, wish.size.split("x"))
    with terminal(wish.command, columns, lines, {}) as shown:
        shown.until(lambda grid: wish.when in grid.text(), wish.timeout)
        shown.read(wish.after)
        wish.out.with_suffix(".txt").write_text(shown.grid.text() + "\n")
        if wish.out.suffix == ".png":
            draw(shown.grid, wish.out)
        shown.interrupt()


if __name__ == "__main__":
    main()

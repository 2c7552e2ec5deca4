"""Picture of a program's screen: runs it in a terminal of some size and draws the screen, as it is then, to a PNG.

    python -m scripts.screenshot OUT.png --size 80x24 --when "killed stage" --after 8 -- peerd demo --steps 60

Needs Pillow and a monospaced font, which peerd does not: so the pictures of README.md are kept in the repository. With
OUT.txt only the text is written.
"""

from __future__ import annotations

import argparse
import importlib
from pathlib import Path
from typing import Any, Final

from tests.kit.terminal import Grid, terminal

FONT: Final = "/usr/share/fonts/truetype/dejavu/DejaVuSansMono{}.ttf"
SIZE: Final = 15  # of a character, in points
CELL: Final = (9, 19)  # pixels of one
MARGIN: Final = 10
GROUND, INK, DIM = (24, 26, 31), (222, 222, 222), (135, 139, 148)
COLOURS: Final = {31: (240, 98, 98), 32: (120, 200, 120), 33: (230, 192, 90), 36: (86, 190, 210)}
BRAILLE: Final = ((0x01, 0x08), (0x02, 0x10), (0x04, 0x20), (0x40, 0x80))  # bits by row and column


def look(style: str) -> tuple[tuple[int, int, int], bool]:
    """Colour, and whether it is bold."""
    numbers = [int(number) for number in style.split(";") if number]
    colour = next((COLOURS[number] for number in reversed(numbers) if number in COLOURS), INK)
    return (DIM if 2 in numbers and colour == INK else colour), 1 in numbers


def draw(grid: Grid, out: Path) -> None:
    """The screen as a PNG with few colours."""
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
            colour, heavy = look(grid.styles[row][column])
            if 0x2800 <= ord(char) <= 0x28FF:
                for line, bits in enumerate(BRAILLE):
                    for side, bit in enumerate(bits):
                        if (ord(char) - 0x2800) & bit:
                            left, top = x + 1 + side * 4, y + 2 + line * 4
                            pen.rectangle((left, top, left + 2, top + 2), fill=colour)
            elif char != " ":
                pen.text((x, y), char, font=bold if heavy else plain, fill=colour)
    image.quantize(96).save(out, optimize=True)


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

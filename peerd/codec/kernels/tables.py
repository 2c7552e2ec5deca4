"""Constants of blockwise quantization as literal bits, and the C header generated from them.

All implementations (torch, C++, CUDA) use these constants, so that they agree bit for bit: computed values would differ
between libraries by a unit in the last place. Each entry is the bit pattern of an IEEE single as an integer.

* DYNAMIC: the 128 magnitudes of the signed 8-bit dynamic code: 0, 126 means of equal steps inside six decades (2, 4,
  ... 64 steps from the smallest to the largest), and 1 ("8-bit Optimizers via Block-wise Quantization"; its smallest
  entry is replaced by a second 1, so that a block's largest value is exact with either sign).
* NF4: the 16 values of the 4-bit normal float code ("QLoRA", appendix E).
* THRESHOLDS: entry j is the smallest single that is not nearer to value j than to value j + 1. A code is the number of
  thresholds that are not above the value.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Final

SMALLEST_BITS: Final = 0x02081CEA  # 1e-37: a block whose largest magnitude is not above it is all zeros
LARGEST_BITS: Final = 0x7F61B1E6  # 3e38: a block with a larger magnitude, NaN or infinity cannot be encoded
FLOAT16_LARGEST_BITS: Final = 0x477FE000  # 65504: the largest scale of float16 values
ONE_BITS: Final = 0x3F800000
INV127_BITS: Final = 0x3C010204
INV7_BITS: Final = 0x3E124925
INV448_BITS: Final = 0x3B124925

DYNAMIC: Final = (
    0x00000000,
    0x365A1A93,
    0x370205FF,
    0x37B24207,
    0x38378034,
    0x388AEFB3,
    0x38BA1F4B,
    0x3923D70A,
    0x398CE704,
    0x39C7E282,
    0x3A016F00,
    0x3A1EECC0,
    0x3A3C6A7F,
    0x3A59E83E,
    0x3A7765FE,
    0x3AA7EF9E,
    0x3AF1A9FC,
    0x3B1DB22D,
    0x3B428F5C,
    0x3B676C8B,
    0x3B8624DD,
    0x3B989375,
    0x3BAB020C,
    0x3BBD70A4,
    0x3BCFDF3B,
    0x3BE24DD3,
    0x3BF4BC6A,
    0x3C039581,
    0x3C0CCCCD,
    0x3C160419,
    0x3C1F3B64,
    0x3C3AE148,
    0x3C68F5C3,
    0x3C8B851F,
    0x3CA28F5C,
    0x3CB9999A,
    0x3CD0A3D7,
    0x3CE7AE14,
    0x3CFEB852,
    0x3D0AE148,
    0x3D166666,
    0x3D21EB85,
    0x3D2D70A4,
    0x3D38F5C3,
    0x3D447AE1,
    0x3D500000,
    0x3D5B851F,
    0x3D670A3D,
    0x3D728F5C,
    0x3D7E147B,
    0x3D84CCCD,
    0x3D8A8F5C,
    0x3D9051EC,
    0x3D96147B,
    0x3D9BD70A,
    0x3DA1999A,
    0x3DA75C29,
    0x3DAD1EB8,
    0x3DB2E148,
    0x3DB8A3D7,
    0x3DBE6666,
    0x3DC428F6,
    0x3DC9EB85,
    0x3DDB3333,
    0x3DF80000,
    0x3E0A6666,
    0x3E18CCCD,
    0x3E273333,
    0x3E35999A,
    0x3E440000,
    0x3E526666,
    0x3E60CCCD,
    0x3E6F3333,
    0x3E7D999A,
    0x3E860000,
    0x3E8D3333,
    0x3E946666,
    0x3E9B999A,
    0x3EA2CCCD,
    0x3EAA0000,
    0x3EB13333,
    0x3EB86666,
    0x3EBF999A,
    0x3EC6CCCD,
    0x3ECE0000,
    0x3ED53333,
    0x3EDC6666,
    0x3EE3999A,
    0x3EEACCCD,
    0x3EF20000,
    0x3EF93333,
    0x3F003333,
    0x3F03CCCD,
    0x3F076666,
    0x3F0B0000,
    0x3F0E999A,
    0x3F123333,
    0x3F15CCCD,
    0x3F196666,
    0x3F1D0000,
    0x3F20999A,
    0x3F243333,
    0x3F27CCCD,
    0x3F2B6666,
    0x3F2F0000,
    0x3F32999A,
    0x3F363333,
    0x3F39CCCD,
    0x3F3D6666,
    0x3F410000,
    0x3F44999A,
    0x3F483333,
    0x3F4BCCCD,
    0x3F4F6666,
    0x3F530000,
    0x3F56999A,
    0x3F5A3333,
    0x3F5DCCCD,
    0x3F616666,
    0x3F650000,
    0x3F68999A,
    0x3F6C3333,
    0x3F6FCCCD,
    0x3F736666,
    0x3F770000,
    0x3F7A999A,
    0x3F7E3333,
    0x3F800000,
)
DYNAMIC_THRESHOLDS: Final = (
    0x35DA1A93,
    0x36B88CA4,
    0x37734507,
    0x3808509C,
    0x3866AFCD,
    0x38A2877F,
    0x39007358,
    0x395ED289,
    0x39AA64C3,
    0x39E56041,
    0x3A102DE0,
    0x3A2DABA0,
    0x3A4B295F,
    0x3A68A71E,
    0x3A91D14F,
    0x3ACCCCCD,
    0x3B0B4396,
    0x3B3020C5,
    0x3B54FDF4,
    0x3B79DB23,
    0x3B8F5C29,
    0x3BA1CAC1,
    0x3BB43958,
    0x3BC6A7F0,
    0x3BD91687,
    0x3BEB851F,
    0x3BFDF3B6,
    0x3C083127,
    0x3C116873,
    0x3C1A9FBF,
    0x3C2D0E56,
    0x3C51EB86,
    0x3C800001,
    0x3C970A3E,
    0x3CAE147B,
    0x3CC51EB9,
    0x3CDC28F6,
    0x3CF33333,
    0x3D051EB9,
    0x3D10A3D7,
    0x3D1C28F6,
    0x3D27AE15,
    0x3D333334,
    0x3D3EB852,
    0x3D4A3D71,
    0x3D55C290,
    0x3D6147AE,
    0x3D6CCCCD,
    0x3D7851EC,
    0x3D81EB86,
    0x3D87AE15,
    0x3D8D70A4,
    0x3D933334,
    0x3D98F5C3,
    0x3D9EB852,
    0x3DA47AE2,
    0x3DAA3D71,
    0x3DB00000,
    0x3DB5C290,
    0x3DBB851F,
    0x3DC147AE,
    0x3DC70A3E,
    0x3DD28F5C,
    0x3DE9999A,
    0x3E033333,
    0x3E11999A,
    0x3E200000,
    0x3E2E6667,
    0x3E3CCCCD,
    0x3E4B3333,
    0x3E59999A,
    0x3E680000,
    0x3E766667,
    0x3E826667,
    0x3E89999A,
    0x3E90CCCD,
    0x3E980000,
    0x3E9F3334,
    0x3EA66667,
    0x3EAD999A,
    0x3EB4CCCD,
    0x3EBC0000,
    0x3EC33334,
    0x3ECA6667,
    0x3ED1999A,
    0x3ED8CCCD,
    0x3EE00000,
    0x3EE73334,
    0x3EEE6667,
    0x3EF5999A,
    0x3EFCCCCD,
    0x3F020000,
    0x3F05999A,
    0x3F093333,
    0x3F0CCCCD,
    0x3F106667,
    0x3F140000,
    0x3F17999A,
    0x3F1B3333,
    0x3F1ECCCD,
    0x3F226667,
    0x3F260000,
    0x3F29999A,
    0x3F2D3333,
    0x3F30CCCD,
    0x3F346667,
    0x3F380000,
    0x3F3B999A,
    0x3F3F3333,
    0x3F42CCCD,
    0x3F466667,
    0x3F4A0000,
    0x3F4D999A,
    0x3F513333,
    0x3F54CCCD,
    0x3F586667,
    0x3F5C0000,
    0x3F5F999A,
    0x3F633333,
    0x3F66CCCD,
    0x3F6A6667,
    0x3F6E0000,
    0x3F71999A,
    0x3F753333,
    0x3F78CCCD,
    0x3F7C6667,
    0x3F7F199A,
)
NF4: Final = (
    0xBF800000,
    0xBF3239B1,
    0xBF066B30,
    0xBECA32A0,
    0xBE91A24D,
    0xBE3D353F,
    0xBDBA7871,
    0x00000000,
    0x3DA2FAFF,
    0x3E24CAE3,
    0x3E7C04DD,
    0x3EAD033A,
    0x3EE1A4B8,
    0x3F1007AB,
    0x3F3913B3,
    0x3F800000,
)
NF4_THRESHOLDS: Final = (
    0xBF591CD8,
    0xBF1C5270,
    0xBEEB8480,
    0xBEADEA76,
    0xBE703CEC,
    0xBE0D38BB,
    0xBD3A7871,
    0x3D22FAFF,
    0x3DF64863,
    0x3E5067E0,
    0x3E9582D5,
    0x3EC753F9,
    0x3F006D04,
    0x3F248DAF,
    0x3F5C89DA,
)

# Fast lookup of a magnitude's dynamic code: the upper bits of the single select a bucket with at most one threshold.
DYNAMIC_LUT_SHIFT: Final = 17
DYNAMIC_LUT_FIRST: Final = (DYNAMIC_THRESHOLDS[0] >> DYNAMIC_LUT_SHIFT) - 1


def dynamic_lut() -> list[int]:
    """Look-up table of dynamic8, by bucket: the code below the bucket's threshold in the lower 8 bits, and above them
    the lower bits of that threshold.

    Bucket 0 lies below all thresholds; the last bucket begins at 1. Without a threshold the upper part is one more than
    any lower bits.
    """
    mask = (1 << DYNAMIC_LUT_SHIFT) - 1
    entries = []
    for bucket in range(DYNAMIC_LUT_FIRST, (ONE_BITS >> DYNAMIC_LUT_SHIFT) + 1):
        below = sum(t >> DYNAMIC_LUT_SHIFT < bucket for t in DYNAMIC_THRESHOLDS)
        inside = [t & mask for t in DYNAMIC_THRESHOLDS if t >> DYNAMIC_LUT_SHIFT == bucket]
        entries.append(below | (inside[0] if inside else mask + 1) << 8)
    return entries


def c_header() -> str:
    """The text of `tables.h`. A file that includes it first defines PEERD_TABLE, the storage class of the arrays."""
    lines = [
        "/* Generated from tables.py, which explains it: python -m peerd.codec.kernels.tables > source/tables.h */"
    ]
    for name in ("SMALLEST", "LARGEST", "ONE", "INV127", "INV7", "INV448"):
        lines.append(f"#define PEERD_{name}_BITS 0x{globals()[f'{name}_BITS']:08X}u")
    lut = dynamic_lut()
    lines.append(f"#define PEERD_DYNAMIC_LUT_SHIFT {DYNAMIC_LUT_SHIFT}")
    lines.append(f"#define PEERD_DYNAMIC_LUT_FIRST {DYNAMIC_LUT_FIRST}u")
    lines.append(f"#define PEERD_DYNAMIC_LUT_COUNT {len(lut)}")
    lines += _c_array("PEERD_DYNAMIC_BITS", DYNAMIC)
    lines += _c_array("PEERD_DYNAMIC_THRESHOLD_BITS", DYNAMIC_THRESHOLDS)
    lines += _c_array("PEERD_NF4_BITS", NF4)
    lines += _c_array("PEERD_NF4_THRESHOLD_BITS", NF4_THRESHOLDS)
    lines += _c_array("PEERD_DYNAMIC_LUT", lut)
    return "\n".join(lines) + "\n"


def _c_array(name: str, values: Sequence[int]) -> list[str]:
    rows = [", ".join(f"0x{value:08X}u" for value in values[i : i + 8]) for i in range(0, len(values), 8)]
    return [f"PEERD_TABLE unsigned int {name}[{len(values)}] = {{", *(f"    {row}," for row in rows), "};"]


if __name__ == "__main__":
    print(c_header(), end="")

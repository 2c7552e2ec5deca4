"""NVRTC, NVIDIA's run-time compiler, by ctypes: find it, and turn CUDA C++ into machine code for one kind of GPU.

torch's CUDA builds bring it, so nobody has to install a compiler. Knows nothing of torch's objects or of a driver,
and needs no GPU. A failure is an NvrtcError, which says in a sentence what is the matter.
"""

from __future__ import annotations

import ctypes
import re
import sys
from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path
from typing import Final

# IEEE single precision throughout: no contraction, no flushing of denormals, exact division.
STRICT: Final = ("--fmad=false", "--ftz=false", "--prec-div=true", "--prec-sqrt=true")
MAJORS: Final = (13, 12, 11)  # versions of CUDA that are looked for when nothing says which one torch has

_BESIDE: Final = re.compile(r"builtins|\.alt\.")  # lie in the same folders and are something else
_OK: Final = 0
_NEEDED: Final = (
    *("nvrtcVersion", "nvrtcGetNumSupportedArchs", "nvrtcGetSupportedArchs", "nvrtcCreateProgram"),
    *("nvrtcCompileProgram", "nvrtcGetCUBINSize", "nvrtcGetCUBIN", "nvrtcGetPTXSize", "nvrtcGetPTX"),
    *("nvrtcGetProgramLogSize", "nvrtcGetProgramLog", "nvrtcDestroyProgram", "nvrtcGetErrorString"),
)


class NvrtcError(Exception):
    """There is no NVRTC, or it does not compile this for that GPU."""


def load(folders: Iterable[Path], majors: Iterable[int] = MAJORS) -> ctypes.CDLL:
    """The NVRTC of one of these versions of CUDA, from the folders (see `folders_of`) or from where programs look.

    NvrtcError when there is none, or none that can be loaded.
    """
    wrong = ""
    for candidate in candidates(list(folders), list(majors)):
        inside = candidate.parent != Path()
        try:
            if inside:  # it opens its second half by name, and would not look where it lies itself
                for half in sorted(candidate.parent.glob("*nvrtc-builtins*")):
                    if ".alt." not in half.name:
                        ctypes.CDLL(str(half))
            return ctypes.CDLL(str(candidate))
        except OSError as error:
            wrong = wrong or (f": {error}" if inside else "")
    what = f"cannot be loaded{wrong}" if wrong else "was not found"
    raise NvrtcError(f"NVRTC, the compiler that torch's CUDA builds bring, {what}")


def folders_of(site: Path) -> list[Path]:
    """Folders under a folder of packages (site-packages) where pip puts NVRTC, alone or with torch."""
    under = ("nvidia/*/lib", "nvidia/*/bin", "nvidia/*/bin/*", "torch/lib")
    return [folder for pattern in under for folder in sorted(site.glob(pattern))]


def candidates(folders: list[Path], majors: list[int]) -> Iterator[Path]:
    """Files that may be NVRTC, then the bare names that programs look for."""
    for major in majors:
        if sys.platform == "win32":
            pattern, names = f"nvrtc64_{major}*_0.dll", (f"nvrtc64_{major}0_0.dll",)
        else:
            pattern, names = f"libnvrtc[.-]*so*{major}*", (f"libnvrtc.so.{major}",)
        for folder in folders:
            yield from (path for path in sorted(folder.glob(pattern)) if not _BESIDE.search(path.name))
        yield from map(Path, names)


class Nvrtc:
    """A loaded NVRTC. NvrtcError when the library is not one, or too old."""

    def __init__(self, library: ctypes.CDLL) -> None:
        missing = [name for name in _NEEDED if not hasattr(library, name)]
        if missing:
            raise NvrtcError(f"this NVRTC is too old for peerd: it has no {missing[0]}")
        self._library = library
        major, minor = ctypes.c_int(), ctypes.c_int()
        self._call("nvrtcVersion", ctypes.byref(major), ctypes.byref(minor))
        self.version = (major.value, minor.value)

    def architectures(self) -> list[int]:
        """The GPUs it compiles for: 90 is compute capability 9.0."""
        count = ctypes.c_int()
        self._call("nvrtcGetNumSupportedArchs", ctypes.byref(count))
        found = (ctypes.c_int * count.value)()
        self._call("nvrtcGetSupportedArchs", found)
        return sorted(found)

    def target(self, capability: tuple[int, int]) -> str:
        """Target of a compilation: the GPU's own machine code, or for a newer GPU PTX, which its driver finishes."""
        wanted = capability[0] * 10 + capability[1]
        known = self.architectures()
        if wanted in known:
            return f"sm_{wanted}"
        older = [architecture for architecture in known if architecture < wanted]
        if not older:
            version = ".".join(map(str, self.version))
            raise NvrtcError(f"NVRTC {version} does not compile for a GPU as old as compute capability {wanted / 10}")
        return f"compute_{older[-1]}"

    def compile(self, source: str, headers: Mapping[str, str], target: str, defines: Iterable[str] = ()) -> bytes:
        """Machine code (target sm_...) or PTX (compute_...) of the source. NvrtcError with the first complaint."""
        program = ctypes.c_void_p()
        count = len(headers)
        texts = (ctypes.c_char_p * count)(*(text.encode() for text in headers.values()))
        names = (ctypes.c_char_p * count)(*(name.encode() for name in headers))
        self._call("nvrtcCreateProgram", ctypes.byref(program), source.encode(), b"peerd.cu", count, texts, names)
        try:
            options = [f"--gpu-architecture={target}", *STRICT, *(f"--define-macro={each}" for each in defines)]
            packed = (ctypes.c_char_p * len(options))(*(option.encode() for option in options))
            code = self._library.nvrtcCompileProgram(program, len(options), packed)
            if code != _OK:
                raise NvrtcError(f"NVRTC refused peerd's kernels: {self._first_complaint(program)}")
            return self._bytes("CUBIN" if target.startswith("sm_") else "PTX", program)
        finally:
            self._library.nvrtcDestroyProgram(ctypes.byref(program))

    def _first_complaint(self, program: ctypes.c_void_p) -> str:
        log = self._bytes("ProgramLog", program).decode(errors="replace").rstrip("\0")
        lines = [line.strip() for line in log.splitlines() if line.strip()]
        return next((line for line in lines if "error" in line), lines[0] if lines else "without a word")

    def _bytes(self, what: str, program: ctypes.c_void_p) -> bytes:
        size = ctypes.c_size_t()
        self._call(f"nvrtcGet{what}Size", program, ctypes.byref(size))
        held = ctypes.create_string_buffer(size.value)
        self._call(f"nvrtcGet{what}", program, held)
        return held.raw

    def _call(self, name: str, *arguments: object) -> None:
        self._check(name, getattr(self._library, name)(*arguments))

    def _check(self, name: str, code: int) -> None:
        if code != _OK:
            describe = self._library.nvrtcGetErrorString
            describe.restype = ctypes.c_char_p
            raise NvrtcError(f"NVRTC failed in {name}: {(describe(code) or b'unknown error').decode()}")

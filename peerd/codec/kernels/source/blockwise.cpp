/* Blockwise quantization for CPUs: the C interface that native.py loads, and the choice of instruction set.

A shared library with this interface only, without the headers of Python or torch, so that one build works with every
version of both. All functions may be called from any thread. Pointers need no alignment, except those of singles that
are also used in arithmetic (peerd_quantize_missing, peerd_dequantize_onto). */
#include "blockwise_common.h"

#if defined(__GNUC__) && defined(__x86_64__)
#define PEERD_X86 1
#if !defined(__clang__)
#pragma GCC diagnostic ignored "-Wmaybe-uninitialized"  // false alarms from GCC's own headers
#endif
#include <cpuid.h>
#include <immintrin.h>
#elif defined(__GNUC__) && defined(__aarch64__) && !defined(__AARCH64EB__)
#define PEERD_NEON 1
#include <arm_neon.h>
#endif

#include "blockwise_plain.h"
#if defined(PEERD_NEON)
#include "blockwise_neon.h"
#endif
#if defined(PEERD_X86)
#include "blockwise_planes.h"

#include "blockwise_avx2.h"
#define PEERD_VBMI 0
#define PEERD_NAMESPACE avx512
#include "blockwise_avx512.h"
#undef PEERD_VBMI
#undef PEERD_NAMESPACE
#define PEERD_VBMI 1
#define PEERD_NAMESPACE avx512_vbmi
#include "blockwise_avx512.h"
#endif

#if defined(_WIN32)
#define PEERD_EXPORT extern "C" __declspec(dllexport)
#else
#define PEERD_EXPORT extern "C" __attribute__((visibility("default")))
#endif

namespace peerd {
namespace {

constexpr int ABI = 2;
enum Isa { PLAIN, AVX2, AVX512, AVX512_VBMI, NEON };
enum Refusal { BAD_DTYPE = -1, BAD_CODE = -2, BAD_BLOCK = -3, BAD_COUNT = -4, BAD_ISA = -5 };
constexpr int64_t LONGEST_BLOCK = 4096;
constexpr int64_t STREAM_BYTES = 16 << 20;  // size of the values from which on results bypass the caches

#if defined(PEERD_X86)
/* Not every compiler's __builtin_cpu_supports detects F16C. */
bool has_f16c() {
    unsigned int a = 0, b = 0, c = 0, d = 0;
    return __get_cpuid(1, &a, &b, &c, &d) && c & bit_F16C;
}
#endif

/* The kernels of an instruction set, or null if this build or processor lacks it. */
const Kernels* kernels_of(int isa) {
#if defined(PEERD_X86)
    __builtin_cpu_init();
    const bool avx2 = __builtin_cpu_supports("avx2") && __builtin_cpu_supports("fma") && has_f16c();
    const bool avx512 = avx2 && __builtin_cpu_supports("avx512f") && __builtin_cpu_supports("avx512bw") &&
                        __builtin_cpu_supports("avx512vl") && __builtin_cpu_supports("avx512dq");
    if (isa == AVX2 && avx2) return &avx2::KERNELS;
    if (isa == AVX512 && avx512) return &avx512::KERNELS;
    if (isa == AVX512_VBMI && avx512 && __builtin_cpu_supports("avx512vbmi")) return &avx512_vbmi::KERNELS;
#endif
#if defined(PEERD_NEON)
    if (isa == NEON) return &neon::KERNELS;
#endif
    return isa == PLAIN ? &plain::KERNELS : nullptr;
}

struct Chosen {
    int isa;
    const Kernels* kernels;
};

Chosen best() {
    const int order[] = {NEON, AVX512_VBMI, AVX512, AVX2};
    for (const int isa : order)
        if (const Kernels* found = kernels_of(isa)) return {isa, found};
    return {PLAIN, &plain::KERNELS};
}

Chosen chosen = best();

int refusal(int dtype, int64_t n, int code, int block_log2) {
    if (dtype < 0 || dtype >= DTYPES) return BAD_DTYPE;
    if (code < FIRST_CODE || code >= FIRST_CODE + CODES) return BAD_CODE;
    if (block_log2 < 6 || int64_t{1} << block_log2 > LONGEST_BLOCK) return BAD_BLOCK;
    return n < 0 ? BAD_COUNT : 0;
}

/* Stores that bypass the caches need whole lines. */
bool streams(const void* to, int64_t bytes) {
    return bytes >= STREAM_BYTES && reinterpret_cast<uintptr_t>(to) % 64 == 0;
}

void end_streaming(bool stream) {
#if defined(PEERD_X86)
    if (stream) _mm_sfence();  // orders the streaming stores before later ones
#else
    static_cast<void>(stream);
#endif
}

/* Writes the error of decoding x to `missed`, or adds it if `more`. */
void miss(const float* x, const float* decoded, int64_t count, float* missed, bool more) {
    if (more) {
        for (int64_t i = 0; i < count; ++i) missed[i] += x[i] - decoded[i];
    } else {
        for (int64_t i = 0; i < count; ++i) missed[i] = x[i] - decoded[i];
    }
}

/* Sets default rounding and subnormals during its lifetime, since the host program may have changed them. */
class UsualArithmetic {
public:
#if defined(PEERD_X86)
    UsualArithmetic() : before(_mm_getcsr()) { _mm_setcsr(0x1F80); }
    ~UsualArithmetic() { _mm_setcsr(before); }

private:
    unsigned int before;
#elif defined(PEERD_NEON)
    UsualArithmetic() {
        const uint64_t usual = 0;
        __asm__ volatile("mrs %0, fpcr" : "=r"(before));
        __asm__ volatile("msr fpcr, %0" : : "r"(usual));
    }
    ~UsualArithmetic() { __asm__ volatile("msr fpcr, %0" : : "r"(before)); }

private:
    uint64_t before;
#else
    UsualArithmetic() {}
    ~UsualArithmetic() {}
#endif
};

}  // namespace
}  // namespace peerd

using namespace peerd;

PEERD_EXPORT int peerd_abi(void) { return ABI; }

PEERD_EXPORT int peerd_isa(void) { return chosen.isa; }

/* For tests, while nothing else runs. Fails if this build or processor lacks the instruction set. */
PEERD_EXPORT int peerd_use_isa(int isa) {
    const Kernels* found = kernels_of(isa);
    if (found == nullptr) return BAD_ISA;
    chosen = {isa, found};
    return 0;
}

PEERD_EXPORT int peerd_quantize(const void* x, int dtype, int64_t n, int code, int block_log2, float* scales,
                                uint8_t* codes) {
    if (const int why = refusal(dtype, n, code, block_log2)) return why;
    const UsualArithmetic usual;
    const bool stream = streams(codes, n * value_bytes(dtype));
    chosen.kernels->quantize[dtype][code - FIRST_CODE](static_cast<const char*>(x), n, int64_t{1} << block_log2,
                                                       reinterpret_cast<char*>(scales), codes, stream);
    end_streaming(stream);
    return 0;
}

PEERD_EXPORT int peerd_dequantize(const uint8_t* codes, const float* scales, int64_t n, int code, int block_log2,
                                  void* out, int dtype) {
    if (const int why = refusal(dtype, n, code, block_log2)) return why;
    const UsualArithmetic usual;
    const bool stream = streams(out, n * value_bytes(dtype));
    chosen.kernels->dequantize[dtype][code - FIRST_CODE](codes, reinterpret_cast<const char*>(scales), n,
                                                         int64_t{1} << block_log2, static_cast<char*>(out), stream);
    end_streaming(stream);
    return 0;
}

PEERD_EXPORT int peerd_scales(const void* x, int dtype, int64_t n, int block_log2, float* scales) {
    if (const int why = refusal(dtype, n, FIRST_CODE, block_log2)) return why;
    const UsualArithmetic usual;
    chosen.kernels->scales[dtype](static_cast<const char*>(x), n, int64_t{1} << block_log2,
                                  reinterpret_cast<char*>(scales));
    return 0;
}

/* Like peerd_quantize, for singles. `missed` receives x minus the decoded values, added to its contents if `more`.
`seen`, which may be x, receives the decoded values. Either may be null. Works run by run, so that everything but the
codes stays in the L1 cache. */
PEERD_EXPORT int peerd_quantize_missing(const float* x, int64_t n, int code, int block_log2, float* scales,
                                        uint8_t* codes, float* missed, int more, float* seen) {
    if (const int why = refusal(FLOAT32, n, code, block_log2)) return why;
    const UsualArithmetic usual;
    const int kind = code - FIRST_CODE;
    const auto quantize = chosen.kernels->quantize[FLOAT32][kind];
    const auto dequantize = chosen.kernels->dequantize[FLOAT32][kind];
    const int64_t block = int64_t{1} << block_log2, length = block < RUN ? RUN : block;
    alignas(64) float decoded[LONGEST_BLOCK];
    for (int64_t run = 0; run < n; run += length) {
        const int64_t count = n - run < length ? n - run : length;
        uint8_t* to = codes + code_bytes(kind, run);
        char* run_scales = reinterpret_cast<char*>(scales + run / block);
        quantize(reinterpret_cast<const char*>(x + run), count, block, run_scales, to, false);
        dequantize(to, run_scales, count, block, reinterpret_cast<char*>(decoded), false);
        if (missed != nullptr) miss(x + run, decoded, count, missed + run, more != 0);
        if (seen != nullptr) memcpy(seen + run, decoded, static_cast<size_t>(count) * sizeof(float));
    }
    return 0;
}

/* out = base + decoded values, all singles; base may be out. */
PEERD_EXPORT int peerd_dequantize_onto(const uint8_t* codes, const float* scales, int64_t n, int code, int block_log2,
                                       const float* base, float* out) {
    if (const int why = refusal(FLOAT32, n, code, block_log2)) return why;
    const UsualArithmetic usual;
    const int kind = code - FIRST_CODE;
    const auto dequantize = chosen.kernels->dequantize[FLOAT32][kind];
    const int64_t block = int64_t{1} << block_log2, length = block < RUN ? RUN : block;
    alignas(64) float decoded[LONGEST_BLOCK];
    for (int64_t run = 0; run < n; run += length) {
        const int64_t count = n - run < length ? n - run : length;
        const char* run_scales = reinterpret_cast<const char*>(scales + run / block);
        dequantize(codes + code_bytes(kind, run), run_scales, count, block, reinterpret_cast<char*>(decoded), false);
        for (int64_t i = 0; i < count; ++i) out[run + i] = base[run + i] + decoded[i];
    }
    return 0;
}

/* Python's build tools export this symbol on Windows; the library is loaded, never imported. */
PEERD_EXPORT void* PyInit__blockwise(void) { return nullptr; }

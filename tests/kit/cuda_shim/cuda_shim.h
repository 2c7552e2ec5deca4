// Enough of CUDA C++ for g++ to compile blockwise.cu: the threads of a CUDA block are fibers that take turns in a
// random order, CUDA blocks follow one another, and shared memory holds rubbish when a block begins.
// Nothing here rounds differently from a GPU: compile with -ffp-contract=off and without fast-math.
#ifndef PEERD_CUDA_SHIM
#define PEERD_CUDA_SHIM
#define PEERD_SHIM

#include <cmath>
#include <cstdint>
#include <cstring>

#define __device__
#define __global__
#define __forceinline__ inline
#define __launch_bounds__(threads)
#define __shared__ static __attribute__((section("peerd_shared")))
#define PEERD_TABLE static const

struct uint2 {
    unsigned x, y;
} __attribute__((aligned(8)));
struct uint4 {
    unsigned x, y, z, w;
} __attribute__((aligned(16)));
struct Index {
    unsigned x;
};

extern Index threadIdx, blockIdx, blockDim, gridDim;  // of the fiber that runs
void __syncthreads();
unsigned __shfl_xor_sync(unsigned mask, unsigned value, int distance);
void peerd_shim_fail(const char* why);

// What a GPU refuses: vectors at addresses that are no multiple of their size (g++ would take them).
template <typename T> inline T& wide(T* at) {
    if ((uintptr_t)at % sizeof(T)) peerd_shim_fail("a vector is read or written where it is not aligned");
    return *at;
}
#define PEERD_WIDE(type, pointer) wide<type>((type*)(pointer))

static inline uint2 make_uint2(unsigned x, unsigned y) { return uint2{x, y}; }
static inline uint4 make_uint4(unsigned x, unsigned y, unsigned z, unsigned w) { return uint4{x, y, z, w}; }

static inline float __uint_as_float(unsigned bits) {
    float value;
    std::memcpy(&value, &bits, 4);
    return value;
}
static inline unsigned __float_as_uint(float value) {
    unsigned bits;
    std::memcpy(&bits, &value, 4);
    return bits;
}
static inline float __fmul_rn(float a, float b) { return a * b; }
static inline float __fadd_rn(float a, float b) { return a + b; }
static inline float __fmaf_rn(float a, float b, float c) { return std::fmaf(a, b, c); }
static inline float __frcp_rn(float a) { return 1.0f / a; }
static inline unsigned max(unsigned a, unsigned b) { return a > b ? a : b; }
static inline unsigned min(unsigned a, unsigned b) { return a < b ? a : b; }

static inline unsigned __byte_perm(unsigned a, unsigned b, unsigned pick) {
    const uint64_t bytes = (uint64_t)b << 32 | a;
    unsigned result = 0;
    for (int k = 0; k < 4; k++) {
        const unsigned selector = pick >> (4 * k) & 15u;
        if (selector > 7) peerd_shim_fail("__byte_perm: sign replication is not emulated");
        result |= (unsigned)(bytes >> (8 * selector) & 0xFFu) << (8 * k);
    }
    return result;
}

// Half precision by the definition: 5 bits of exponent, 10 of fraction.
static inline float half_to_float(unsigned half) {
    const unsigned sign = (half & 0x8000u) << 16, exponent = half >> 10 & 31u, fraction = half & 0x3FFu;
    if (exponent == 31) return __uint_as_float(sign | 0x7F800000u | fraction << 13 | (fraction ? 0x400000u : 0));
    const float magnitude = exponent ? std::ldexp((float)(1024 + fraction), (int)exponent - 25)
                                     : std::ldexp((float)fraction, -24);
    return __uint_as_float(sign | __float_as_uint(magnitude));
}
static inline unsigned float_to_half(float value) {
    const unsigned sign = __float_as_uint(value) >> 16 & 0x8000u;
    const double magnitude = std::fabs((double)value);
    if (value != value) return 0x7FFFu;
    if (magnitude >= 65520.0) return sign | 0x7C00u;
    int exponent = magnitude > 0 ? std::ilogb(magnitude) : -14;
    if (exponent < -14) exponent = -14;
    const unsigned steps = (unsigned)std::nearbyint(std::ldexp(magnitude, 10 - exponent));  // 0 to 2048, ties to even
    return sign | (((unsigned)(exponent + 14) << 10) + steps);
}
#endif

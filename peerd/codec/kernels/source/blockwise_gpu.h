// Memory access of blockwise.cu: the kernels' arguments, the values of each thread, conversions of 16-bit floats, and
// loads and stores of one thread's values or codes in one row.
//
// WHOLE: the tile is inside the tensor and all addresses are aligned, so vectors are moved. Otherwise every value is
// moved separately; beyond the end, zeros are read and nothing is written.

typedef unsigned int u32;
typedef unsigned char u8;
typedef unsigned short u16;
typedef long long i64;

enum Dtype { F32, BF16, F16 };
enum Code { NONE, DYNAMIC8, INT8, INT4, NF4, E4M3 };
enum { THREADS = 256, LANES = 32, WARPS = THREADS / LANES, PER_THREAD = 16, TILE = THREADS * PER_THREAD };
enum { WARP_VALUES = LANES * PER_THREAD, WARP_LOG2 = 9, NF4_BUCKETS = 64 };

// Arguments of a kernel. The host (cuda.py) has the same structure.
struct Job {
    void* values;    // read by quantize, written by dequantize
    u8* codes;
    float* scales;
    i64 count;       // number of values
    int block_log2;  // 6 to 12
    int unused;
};

template <Dtype D> struct Row {
    static const int WIDTH = D == F32 ? 4 : 8;  // a lane's values in 16 bytes
    static const int COUNT = PER_THREAD / WIDTH;
    static const int LOG2 = D == F32 ? 7 : 8;  // values in a row
    static const int BYTES = D == F32 ? 4 : 2;  // per value
};
template <Code C> struct Bits { static const int COUNT = C == INT4 || C == NF4 ? 4 : 8; };

// Offset in the tile of this thread's 16 bytes in a row.
template <Dtype D> __device__ __forceinline__ int place(int row) {
    const int thread = threadIdx.x;
    return (thread / LANES) * WARP_VALUES + (row << Row<D>::LOG2) + (thread % LANES) * Row<D>::WIDTH;
}

// Whether the addresses permit WHOLE.
template <Dtype D, Code C> __device__ __forceinline__ bool aligned(const Job& job) {
    const u32 values = (u32)(unsigned long long)job.values, codes = (u32)(unsigned long long)job.codes;
    return values % 16 == 0 && codes % (Row<D>::WIDTH * Bits<C>::COUNT / 8) == 0;
}

// --- conversion between singles and the 16-bit types ----------------------------------------------------------------

#ifndef PEERD_SHIM
__device__ __forceinline__ float half_to_float(u32 half) {
    float wide;
    asm("cvt.f32.f16 %0, %1;" : "=f"(wide) : "h"((u16)half));
    return wide;
}

__device__ __forceinline__ u32 float_to_half(float value) {
    u16 half;
    asm("cvt.rn.f16.f32 %0, %1;" : "=h"(half) : "f"(value));
    return half;
}

#if __CUDA_ARCH__ >= 800
#define PEERD_PAIRS
__device__ __forceinline__ u32 halves(float low, float high) {
    u32 pair;
    asm("cvt.rn.f16x2.f32 %0, %1, %2;" : "=r"(pair) : "f"(high), "f"(low));
    return pair;
}

__device__ __forceinline__ u32 bfloats(float low, float high) {
    u32 pair;
    asm("cvt.rn.bf16x2.f32 %0, %1, %2;" : "=r"(pair) : "f"(high), "f"(low));
    return pair;
}
#endif
#endif

#ifndef PEERD_PAIRS
__device__ __forceinline__ u32 float_to_bfloat(float value) {
    const u32 bits = __float_as_uint(value);
    if ((bits & 0x7FFFFFFFu) > 0x7F800000u) return 0x7FC0u;  // NaN: the carry must not make it a number
    return (bits + 0x7FFFu + ((bits >> 16) & 1u)) >> 16;
}

__device__ __forceinline__ u32 halves(float low, float high) {
    return float_to_half(low) | float_to_half(high) << 16;
}

__device__ __forceinline__ u32 bfloats(float low, float high) {
    return float_to_bfloat(low) | float_to_bfloat(high) << 16;
}
#endif

template <Dtype D> __device__ __forceinline__ u32 pair_of(float low, float high) {
    return D == BF16 ? bfloats(low, high) : halves(low, high);
}

// --- memory: the WIDTH values, or their codes, of one thread in one row ---------------------------------------------

// Values as in memory: one single per word, or two 16-bit values.
template <Dtype D, bool WHOLE> __device__ __forceinline__ void load(u32* word, const Job& job, i64 at) {
    if (WHOLE) {
        const uint4 raw = PEERD_WIDE(const uint4, (const u8*)job.values + at * Row<D>::BYTES);
        word[0] = raw.x;
        word[1] = raw.y;
        word[2] = raw.z;
        word[3] = raw.w;
    } else {
        word[0] = word[1] = word[2] = word[3] = 0;
#pragma unroll
        for (int j = 0; j < Row<D>::WIDTH; j++) {
            if (at + j >= job.count) break;
            if (D == F32) word[j % 4] = ((const u32*)job.values)[at + j];
            else word[j / 2] |= (u32)((const u16*)job.values)[at + j] << (j % 2 * 16);
        }
    }
}

// The j-th value as a single.
template <Dtype D> __device__ __forceinline__ float value_of(const u32* word, int j) {
    if (D == F32) return __uint_as_float(word[j % 4]);
    if (D == F16) return half_to_float(j % 2 ? word[j / 2] >> 16 : word[j / 2] & 0xFFFFu);
    return __uint_as_float(j % 2 ? word[j / 2] & 0xFFFF0000u : word[j / 2] << 16);
}

// The largest magnitude among four words, as bits of a single.
template <Dtype D> __device__ __forceinline__ u32 largest_of(const u32* word) {
    u32 largest = 0;
    if (D == F32) {
#pragma unroll
        for (int k = 0; k < 4; k++) largest = max(largest, word[k] & 0x7FFFFFFFu);
    } else {
#pragma unroll
        for (int k = 0; k < 4; k++) {  // only the upper half of `largest` is used
            const u32 pair = word[k] & 0x7FFF7FFFu;
            largest = max(largest, max(pair, pair << 16));
        }
        largest = D == BF16 ? largest & 0xFFFF0000u : __float_as_uint(half_to_float(largest >> 16));
    }
    return largest;
}

// The signs of four values, starting at the j-th, in the upper bits of four bytes.
template <Dtype D> __device__ __forceinline__ u32 signs_of(const u32* word, int j) {
    if (D == F32) return __byte_perm(__byte_perm(word[0], word[1], 0x73), __byte_perm(word[2], word[3], 0x73), 0x5410);
    return __byte_perm(word[j / 2], word[j / 2 + 1], 0x7531);
}

template <Dtype D, bool WHOLE> __device__ __forceinline__ void store(const float* x, const Job& job, i64 at) {
    const int width = Row<D>::WIDTH;
    u32 word[4];
#pragma unroll
    for (int k = 0; k < 4; k++) {
        word[k] = D == F32 ? __float_as_uint(x[k]) : pair_of<D>(x[2 * k % width], x[(2 * k + 1) % width]);
    }
    if (WHOLE) {
        PEERD_WIDE(uint4, (u8*)job.values + at * Row<D>::BYTES) = make_uint4(word[0], word[1], word[2], word[3]);
    } else {
#pragma unroll
        for (int j = 0; j < width; j++) {
            if (at + j >= job.count) break;
            if (D == F32) ((u32*)job.values)[at + j] = word[j % 4];
            else ((u16*)job.values)[at + j] = (u16)(word[j / 2] >> (j % 2 * 16));
        }
    }
}

// Codes are in words in memory order: 2, 4 or 8 bytes.
template <Dtype D, Code C, bool WHOLE>
__device__ __forceinline__ void load_codes(u32* word, const Job& job, i64 at) {
    const int bytes = Row<D>::WIDTH * Bits<C>::COUNT / 8;
    const u8* from = job.codes + at * Bits<C>::COUNT / 8;
    word[0] = word[1] = 0;
    if (WHOLE && bytes == 8) {
        const uint2 raw = PEERD_WIDE(const uint2, from);
        word[0] = raw.x;
        word[1] = raw.y;
    } else if (WHOLE) {
        word[0] = bytes == 4 ? PEERD_WIDE(const u32, from) : PEERD_WIDE(const u16, from);
    } else {
#pragma unroll
        for (int k = 0; k < bytes; k++) {
            if (at + k * (8 / Bits<C>::COUNT) < job.count) word[k / 4] |= (u32)from[k] << (k % 4 * 8);
        }
    }
}

template <Dtype D, Code C, bool WHOLE>
__device__ __forceinline__ void store_codes(const u32* word, const Job& job, i64 at) {
    const int bytes = Row<D>::WIDTH * Bits<C>::COUNT / 8;
    const int each = 8 / Bits<C>::COUNT;  // values per byte
    u8* to = job.codes + at * Bits<C>::COUNT / 8;
    if (WHOLE && bytes == 8) PEERD_WIDE(uint2, to) = make_uint2(word[0], word[1]);
    else if (WHOLE && bytes == 4) PEERD_WIDE(u32, to) = word[0];
    else if (WHOLE) PEERD_WIDE(u16, to) = (u16)word[0];
    else {
#pragma unroll
        for (int k = 0; k < bytes; k++) {
            const u32 byte = word[k / 4] >> (k % 4 * 8);
            if (at + k * each + each <= job.count) to[k] = (u8)byte;
            else if (at + k * each < job.count) to[k] = (u8)(byte & 15u);  // the last code of an odd count
        }
    }
}

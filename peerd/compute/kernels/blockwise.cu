// Blockwise quantization on a GPU, bit for bit what reference.py defines. Compiled at run time by NVRTC (cuda.py), by
// nvcc as a check, and by g++ with a shim in the tests; so there are no includes but tables.h.
//
// 256 threads take a tile of 4096 values at a time, 16 values each: a whole number of blocks, whatever their size.
// Each value is read once and kept in a register: largest magnitude, scale, code. A warp owns 512 neighbours, in rows;
// of a row, each lane has 16 bytes. Blocks of up to 512 values stay inside a warp; larger ones meet in shared memory.
// A tile that reaches beyond the end, or memory that is not aligned, is read and written value by value.
// The grid holds as many CUDA blocks as run at once; they walk over the tiles, and set up their tables only once.

#ifndef PEERD_SHIM  // the tests bring their own
#define PEERD_TABLE __device__ const
#define PEERD_WIDE(type, pointer) (*(type*)(pointer))
#endif
#ifdef __CUDACC__
#pragma nv_diag_suppress 177  // not every table of the header is used here
#endif
#include "tables.h"

typedef unsigned int u32;
typedef unsigned char u8;
typedef unsigned short u16;
typedef long long i64;

enum Dtype { F32, BF16, F16 };
enum Code { NONE, DYNAMIC8, INT8, INT4, NF4, E4M3 };
enum { THREADS = 256, LANES = 32, WARPS = THREADS / LANES, PER_THREAD = 16, TILE = THREADS * PER_THREAD };
enum { WARP_VALUES = LANES * PER_THREAD, WARP_LOG2 = 9, NF4_BUCKETS = 64 };

// All that a kernel is told. The host (cuda.py) has the same structure.
struct Job {
    void* values;    // read by quantize, written by dequantize
    u8* codes;
    float* scales;
    i64 count;       // of values
    int block_log2;  // 6 to 12
    int unused;
};

template <Dtype D> struct Row {
    static const int WIDTH = D == F32 ? 4 : 8;  // values of a lane in 16 bytes
    static const int COUNT = PER_THREAD / WIDTH;
    static const int LOG2 = D == F32 ? 7 : 8;  // values in a row
    static const int BYTES = D == F32 ? 4 : 2;  // of a value
};
template <Code C> struct Bits { static const int COUNT = C == INT4 || C == NF4 ? 4 : 8; };

// Where in its tile the 16 bytes of this thread's row begin.
template <Dtype D> __device__ __forceinline__ int place(int row) {
    const int thread = threadIdx.x;
    return (thread / LANES) * WARP_VALUES + (row << Row<D>::LOG2) + (thread % LANES) * Row<D>::WIDTH;
}

__device__ __forceinline__ bool aligned(const void* pointer, int bytes) {
    return ((u32)(unsigned long long)pointer & (bytes - 1)) == 0;
}

// --- singles to and from the 16-bit types ---------------------------------------------------------------------------

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

template <Dtype D> __device__ __forceinline__ float widen(u32 bits) {
    if (D == F32) return __uint_as_float(bits);
    return D == BF16 ? __uint_as_float(bits << 16) : half_to_float(bits);
}

template <Dtype D> __device__ __forceinline__ u32 pair_of(float low, float high) {
    return D == BF16 ? bfloats(low, high) : halves(low, high);
}

// --- memory: the WIDTH values, or their codes, of one thread in one row ---------------------------------------------

template <Dtype D> __device__ __forceinline__ void load(float* x, const Job& job, i64 at, bool whole) {
    const int width = Row<D>::WIDTH;
    if (whole) {
        const uint4 raw = PEERD_WIDE(const uint4, (const u8*)job.values + at * Row<D>::BYTES);
        const u32 word[4] = {raw.x, raw.y, raw.z, raw.w};
#pragma unroll
        for (int j = 0; j < width; j++) {
            if (D == F32) x[j] = __uint_as_float(word[j % 4]);
            else if (D == BF16 && j % 2) x[j] = __uint_as_float(word[j / 2] & 0xFFFF0000u);
            else x[j] = widen<D>(j % 2 ? word[j / 2] >> 16 : word[j / 2] & 0xFFFFu);
        }
        return;
    }
#pragma unroll
    for (int j = 0; j < width; j++) {
        u32 bits = 0;
        if (at + j < job.count) bits = D == F32 ? ((const u32*)job.values)[at + j] : ((const u16*)job.values)[at + j];
        x[j] = widen<D>(bits);
    }
}

template <Dtype D> __device__ __forceinline__ void store(const float* x, const Job& job, i64 at, bool whole) {
    const int width = Row<D>::WIDTH;
    u32 word[4];
#pragma unroll
    for (int k = 0; k < 4; k++) {
        word[k] = D == F32 ? __float_as_uint(x[k]) : pair_of<D>(x[2 * k % width], x[(2 * k + 1) % width]);
    }
    if (whole) {
        PEERD_WIDE(uint4, (u8*)job.values + at * Row<D>::BYTES) = make_uint4(word[0], word[1], word[2], word[3]);
        return;
    }
#pragma unroll
    for (int j = 0; j < width; j++) {
        if (at + j >= job.count) break;
        if (D == F32) ((u32*)job.values)[at + j] = word[j % 4];
        else ((u16*)job.values)[at + j] = (u16)(word[j / 2] >> (j % 2 * 16));
    }
}

// Codes lie in words in the order of memory: 2, 4 or 8 bytes.
template <Dtype D, Code C> __device__ __forceinline__ void load_codes(u32* word, const Job& job, i64 at, bool whole) {
    const int bytes = Row<D>::WIDTH * Bits<C>::COUNT / 8;
    const u8* from = job.codes + at * Bits<C>::COUNT / 8;
    word[0] = word[1] = 0;
    if (whole && bytes == 8) {
        const uint2 raw = PEERD_WIDE(const uint2, from);
        word[0] = raw.x;
        word[1] = raw.y;
    } else if (whole) {
        word[0] = bytes == 4 ? PEERD_WIDE(const u32, from) : PEERD_WIDE(const u16, from);
    } else {
#pragma unroll
        for (int k = 0; k < bytes; k++) {
            if (at + k * (8 / Bits<C>::COUNT) < job.count) word[k / 4] |= (u32)from[k] << (k % 4 * 8);
        }
    }
}

template <Dtype D, Code C>
__device__ __forceinline__ void store_codes(const u32* word, const Job& job, i64 at, bool whole) {
    const int bytes = Row<D>::WIDTH * Bits<C>::COUNT / 8;
    const int each = 8 / Bits<C>::COUNT;  // values in a byte
    u8* to = job.codes + at * Bits<C>::COUNT / 8;
    if (whole && bytes == 8) PEERD_WIDE(uint2, to) = make_uint2(word[0], word[1]);
    else if (whole && bytes == 4) PEERD_WIDE(u32, to) = word[0];
    else if (whole) PEERD_WIDE(u16, to) = (u16)word[0];
    else {
#pragma unroll
        for (int k = 0; k < bytes; k++) {
            const u32 byte = word[k / 4] >> (k % 4 * 8);
            if (at + k * each + each <= job.count) to[k] = (u8)byte;
            else if (at + k * each < job.count) to[k] = (u8)(byte & 15u);  // the last of an odd number
        }
    }
}

// --- tables in shared memory ----------------------------------------------------------------------------------------

// What a CUDA block shares: largest magnitudes of its warps (two sets, used in turn), and the table of its code.
template <Code C> struct Shared {
    u32 largest[2][WARPS];
    __device__ void prepare() {}
};

// Encoding dynamic8: the upper bits of a magnitude choose an entry; magnitude + entry has the code in bits 17 to 23:
// the entry takes the upper bits away, puts the code there, and makes the lower bits carry at the threshold.
template <> struct Shared<DYNAMIC8> {
    u32 largest[2][WARPS];
    u32 carry[PEERD_DYNAMIC_LUT_COUNT];
    __device__ void prepare() {
        const u32 shift = PEERD_DYNAMIC_LUT_SHIFT;
        for (u32 i = threadIdx.x; i < PEERD_DYNAMIC_LUT_COUNT; i += THREADS) {
            const u32 entry = PEERD_DYNAMIC_LUT[i];
            carry[i] = ((entry & 0xFFu) << shift) + (1u << shift) - (entry >> 8) -
                       ((PEERD_DYNAMIC_LUT_FIRST + i) << shift);
        }
    }
};

// The bucket of a value in [-1, 1] for nf4, never falling as the value grows: 0 to 32, each 1/16 wide. Thresholds lie
// further apart, so that a bucket holds one at most. NaN gives some bucket below 64.
__device__ __forceinline__ u32 nf4_bucket(float n) {
    return __float_as_uint(__fmaf_rn(n, 16.0f, 12582928.0f)) % NF4_BUCKETS;  // 1.5 * 2^23 + 16: the integer below
}

template <> struct Shared<NF4> {
    u32 largest[2][WARPS];
    uint2 step[NF4_BUCKETS];  // the threshold (bits) in the bucket, and the code below it
    __device__ void prepare() {
        const u32 bucket = threadIdx.x;
        if (bucket >= NF4_BUCKETS) return;
        uint2 found = make_uint2(0x7F800000u, 0);
        for (int j = 0; j < 15; j++) {
            const u32 bits = PEERD_NF4_THRESHOLD_BITS[j];
            const u32 its = nf4_bucket(__uint_as_float(bits));
            if (its < bucket) found.y++;
            if (its == bucket) found.x = bits;
        }
        step[bucket] = found;
    }
};

// Decoding: code to value. The other codes are computed.
template <Code C> struct Values {
    __device__ void prepare() {}
};
template <> struct Values<DYNAMIC8> {
    float of[256];
    __device__ void prepare() {
        of[threadIdx.x] = __uint_as_float(PEERD_DYNAMIC_BITS[threadIdx.x % 128] | (threadIdx.x / 128) << 31);
    }
};
template <> struct Values<NF4> {
    float of[16];
    __device__ void prepare() {
        if (threadIdx.x < 16) of[threadIdx.x] = __uint_as_float(PEERD_NF4_BITS[threadIdx.x]);
    }
};

// --- values to codes ------------------------------------------------------------------------------------------------

// One byte of each of four words.
template <int BYTE> __device__ __forceinline__ u32 gather(u32 a, u32 b, u32 c, u32 d) {
    const u32 pick = BYTE | (BYTE + 4) << 4;
    return __byte_perm(__byte_perm(a, b, pick), __byte_perm(c, d, pick), 0x5410);
}

__device__ __forceinline__ u32 dynamic_sum(float n, const Shared<DYNAMIC8>& shared) {
    const float first = __uint_as_float(PEERD_DYNAMIC_LUT_FIRST << PEERD_DYNAMIC_LUT_SHIFT);
    const u32 magnitude = __float_as_uint(fmaxf(fabsf(n), first));  // NaN, in a block without codes, becomes `first`
    return magnitude + shared.carry[(magnitude >> PEERD_DYNAMIC_LUT_SHIFT) - PEERD_DYNAMIC_LUT_FIRST];
}

// In the low byte: `n * 448` as e4m3 without its sign. Adding 2^20 of its own binade (or of the smallest normal one)
// rounds to three bits of fraction; upper bits of that number are the exponent.
__device__ __forceinline__ u32 e4m3(float n) {
    const float scaled = __fmul_rn(n, 448.0f);
    const u32 binade = max(__float_as_uint(scaled) & 0x7F800000u, 0x3C800000u) + (20u << 23);
    const float sum = __fadd_rn(fabsf(scaled), __uint_as_float(binade));
    return __float_as_uint(sum) + (binade >> 20) - (141u << 3);
}

__device__ __forceinline__ u32 nf4(float n, const Shared<NF4>& shared) {
    const uint2 step = shared.step[nf4_bucket(n)];
    return step.y + (n >= __uint_as_float(step.x) ? 1u : 0u);
}

template <Code C> struct Encoder;

template <> struct Encoder<DYNAMIC8> {
    static const u32 ZERO = 0;
    static __device__ __forceinline__ u32 four(const float* x, float inverse, const Shared<DYNAMIC8>& shared) {
        u32 sum[4];
#pragma unroll
        for (int j = 0; j < 4; j++) sum[j] = dynamic_sum(__fmul_rn(x[j], inverse), shared);
        const u32 signs = gather<3>(__float_as_uint(x[0]), __float_as_uint(x[1]), __float_as_uint(x[2]),
                                    __float_as_uint(x[3]));
        return (gather<2>(sum[0], sum[1], sum[2], sum[3]) >> 1 & 0x7F7F7F7Fu) | (signs & 0x80808080u);
    }
};

template <> struct Encoder<INT8> {
    static const u32 ZERO = 0;
    static __device__ __forceinline__ u32 four(const float* x, float inverse, const Shared<INT8>&) {
        u32 sum[4];  // adding 1.5 * 2^23 rounds to a whole number, half to even, and leaves it in the lower bits
#pragma unroll
        for (int j = 0; j < 4; j++) {
            sum[j] = __float_as_uint(__fadd_rn(__fmul_rn(__fmul_rn(x[j], inverse), 127.0f), 12582912.0f));
        }
        return gather<0>(sum[0], sum[1], sum[2], sum[3]);
    }
};

template <> struct Encoder<E4M3> {
    static const u32 ZERO = 0;
    static __device__ __forceinline__ u32 four(const float* x, float inverse, const Shared<E4M3>&) {
        u32 code[4];
#pragma unroll
        for (int j = 0; j < 4; j++) code[j] = e4m3(__fmul_rn(x[j], inverse));
        const u32 signs = gather<3>(__float_as_uint(x[0]), __float_as_uint(x[1]), __float_as_uint(x[2]),
                                    __float_as_uint(x[3]));
        return (gather<0>(code[0], code[1], code[2], code[3]) & 0x7F7F7F7Fu) | (signs & 0x80808080u);
    }
};

template <> struct Encoder<INT4> {
    static const u32 ZERO = 0x88888888u;
    static __device__ __forceinline__ u32 one(float n, const Shared<INT4>&) {
        return __float_as_uint(__fadd_rn(__fmul_rn(n, 7.0f), 12582920.0f)) - 0x4B400000u;  // 8 more, see INT8
    }
};

template <> struct Encoder<NF4> {
    static const u32 ZERO = 0x77777777u;
    static __device__ __forceinline__ u32 one(float n, const Shared<NF4>& shared) { return nf4(n, shared); }
};

template <Dtype D, Code C, int BITS> struct Packed {
    static __device__ __forceinline__ void make(u32* word, const float* x, float inverse, const Shared<C>& shared) {
#pragma unroll
        for (int k = 0; k < Row<D>::WIDTH / 4; k++) word[k] = Encoder<C>::four(x + 4 * k, inverse, shared);
    }
};
template <Dtype D, Code C> struct Packed<D, C, 4> {
    static __device__ __forceinline__ void make(u32* word, const float* x, float inverse, const Shared<C>& shared) {
        u32 all = 0;
#pragma unroll
        for (int j = Row<D>::WIDTH - 1; j >= 0; j--) {
            all = (all << 4) + Encoder<C>::one(__fmul_rn(x[j], inverse), shared);
        }
        word[0] = all;
    }
};

// --- scales ---------------------------------------------------------------------------------------------------------

// The scale of the block that a row of this thread belongs to (bits), its inverse (0 when the block has no codes).
struct Scale {
    u32 bits;
    float inverse;
};

__device__ __forceinline__ bool usable(u32 bits) { return bits - 1 < PEERD_LARGEST_BITS; }

__device__ __forceinline__ Scale scale_of(u32 largest) {
    Scale scale;
    scale.bits = largest > PEERD_SMALLEST_BITS ? largest : 0;
    scale.inverse = usable(scale.bits) ? __frcp_rn(__uint_as_float(scale.bits)) : 0.0f;
    return scale;
}

// The largest of neighbouring lanes; their number is a power of two.
__device__ __forceinline__ u32 over_lanes(u32 largest, int lanes) {
    for (int distance = lanes / 2; distance > 0; distance /= 2) {
        largest = max(largest, __shfl_xor_sync(0xFFFFFFFFu, largest, distance));
    }
    return largest;
}

// The largest of the warps that share a block. `turn` alternates from tile to tile: one barrier is then enough.
__device__ __forceinline__ u32 over_warps(u32 largest, u32 (*shared)[WARPS], int block_log2, int turn) {
    const int warp = threadIdx.x / LANES, together = 1 << (block_log2 - WARP_LOG2);
    if (threadIdx.x % LANES == 0) shared[turn][warp] = largest;
    __syncthreads();
    const int first = warp & ~(together - 1);
    for (int other = 0; other < together; other++) largest = max(largest, shared[turn][first + other]);
    return largest;
}

// The branches depend on the block size alone: all threads of the grid take the same one.
template <Dtype D>
__device__ __forceinline__ void find_scales(Scale* scale, const float* x, u32 (*shared)[WARPS], int block_log2, int turn) {
    const int width = Row<D>::WIDTH, rows = Row<D>::COUNT;
    u32 largest[rows];
#pragma unroll
    for (int row = 0; row < rows; row++) {
        largest[row] = 0;
#pragma unroll
        for (int j = 0; j < width; j++) {
            largest[row] = max(largest[row], __float_as_uint(x[row * width + j]) & 0x7FFFFFFFu);
        }
    }
    if (block_log2 >= WARP_LOG2) {
        u32 all = 0;
#pragma unroll
        for (int row = 0; row < rows; row++) all = max(all, largest[row]);
        all = over_lanes(all, LANES);
        if (block_log2 > WARP_LOG2) all = over_warps(all, shared, block_log2, turn);
        scale[0] = scale_of(all);
#pragma unroll
        for (int row = 1; row < rows; row++) scale[row] = scale[0];
    } else if (block_log2 > Row<D>::LOG2) {  // two rows
#pragma unroll
        for (int row = 0; row < rows; row += 2) {
            scale[row] = scale_of(over_lanes(max(largest[row], largest[row + 1]), LANES));
            scale[row + 1] = scale[row];
        }
    } else {
        const int lanes = (1 << block_log2) / width;
#pragma unroll
        for (int row = 0; row < rows; row++) scale[row] = scale_of(over_lanes(largest[row], lanes));
    }
}

// --- kernels --------------------------------------------------------------------------------------------------------

template <Dtype D, Code C> struct Coder {
    static __device__ __forceinline__ void store(const float* x, const Scale& scale, const Shared<C>& shared,
                                                 const Job& job, i64 at, bool whole) {
        u32 word[2] = {0, 0};
        Packed<D, C, Bits<C>::COUNT>::make(word, x, scale.inverse, shared);
        if (!usable(scale.bits)) word[0] = word[1] = Encoder<C>::ZERO;
        store_codes<D, C>(word, job, at, whole);
    }
};
template <Dtype D> struct Coder<D, NONE> {
    static __device__ __forceinline__ void store(const float*, const Scale&, const Shared<NONE>&, const Job&, i64, bool) {}
};

template <Dtype D, Code C> __device__ __forceinline__ void quantize(const Job& job, Shared<C>& shared) {
    const int width = Row<D>::WIDTH, rows = Row<D>::COUNT;
    const bool read_wide = aligned(job.values, 16), write_wide = aligned(job.codes, width * Bits<C>::COUNT / 8);
    shared.prepare();
    __syncthreads();
    int turn = 0;
    for (i64 tile = (i64)blockIdx.x * TILE; tile < job.count; tile += (i64)gridDim.x * TILE) {
        const bool inside = job.count - tile >= TILE;
        float x[PER_THREAD];
        Scale scale[rows];
#pragma unroll
        for (int row = 0; row < rows; row++) load<D>(x + row * width, job, tile + place<D>(row), inside && read_wide);
        find_scales<D>(scale, x, shared.largest, job.block_log2, turn);
        turn ^= 1;
#pragma unroll
        for (int row = 0; row < rows; row++) {
            const i64 at = tile + place<D>(row);
            if (at >= job.count) break;
            if (((int)place<D>(row) & ((1 << job.block_log2) - 1)) == 0) {
                job.scales[at >> job.block_log2] = __uint_as_float(scale[row].bits);
            }
            Coder<D, C>::store(x + row * width, scale[row], shared, job, at, inside && write_wide);
        }
    }
}

// A code's value without its scale, and what the scale is multiplied with first.
template <Code C> struct Decoder;

template <> struct Decoder<DYNAMIC8> {
    static __device__ __forceinline__ float scale(float scale) { return scale; }
    static __device__ __forceinline__ float one(u32 byte, const Values<DYNAMIC8>& values) { return values.of[byte]; }
};
template <> struct Decoder<INT8> {
    static __device__ __forceinline__ float scale(float scale) {
        return __fmul_rn(scale, __uint_as_float(PEERD_INV127_BITS));
    }
    static __device__ __forceinline__ float one(u32 byte, const Values<INT8>&) {
        return fmaxf(__fadd_rn(__uint_as_float(byte ^ 0x4B000080u), -8388736.0f), -127.0f);  // 2^23 + 128 + q
    }
};
template <> struct Decoder<INT4> {
    static __device__ __forceinline__ float scale(float scale) {
        return __fmul_rn(scale, __uint_as_float(PEERD_INV7_BITS));
    }
    static __device__ __forceinline__ float one(u32 nibble, const Values<INT4>&) {
        return fmaxf(__fadd_rn(__uint_as_float(nibble | 0x4B000000u), -8388616.0f), -7.0f);  // 2^23 + 8 + q
    }
};
template <> struct Decoder<NF4> {
    static __device__ __forceinline__ float scale(float scale) { return scale; }
    static __device__ __forceinline__ float one(u32 nibble, const Values<NF4>& values) { return values.of[nibble]; }
};
template <> struct Decoder<E4M3> {
    static __device__ __forceinline__ float scale(float scale) {
        return __fmul_rn(scale, __uint_as_float(PEERD_INV448_BITS));
    }
    static __device__ __forceinline__ float one(u32 byte, const Values<E4M3>&) {
        const u32 magnitude = min(byte & 0x7Fu, 0x7Eu);  // its NaN counts as its largest value
        return __fmul_rn(__uint_as_float((byte & 0x80u) << 24 | magnitude << 20), __uint_as_float(0x7B800000u));  // 2^120
    }
};

template <Dtype D, Code C> __device__ __forceinline__ void dequantize(const Job& job, Values<C>& values) {
    const int width = Row<D>::WIDTH, bits = Bits<C>::COUNT;
    const bool write_wide = aligned(job.values, 16), read_wide = aligned(job.codes, width * bits / 8);
    values.prepare();
    __syncthreads();
    for (i64 tile = (i64)blockIdx.x * TILE; tile < job.count; tile += (i64)gridDim.x * TILE) {
        const bool inside = job.count - tile >= TILE;
        u32 word[Row<D>::COUNT][2];
        float scale[Row<D>::COUNT];
#pragma unroll
        for (int row = 0; row < Row<D>::COUNT; row++) {
            const i64 at = tile + place<D>(row);
            load_codes<D, C>(word[row], job, at, inside && read_wide);
            scale[row] = at < job.count ? job.scales[at >> job.block_log2] : 0.0f;
        }
#pragma unroll
        for (int row = 0; row < Row<D>::COUNT; row++) {
            const float factor = Decoder<C>::scale(scale[row]);
            float x[width];
#pragma unroll
            for (int j = 0; j < width; j++) {
                const u32 code = word[row][j * bits / 32] >> (j * bits % 32) & ((1u << bits) - 1);
                x[j] = __fmul_rn(Decoder<C>::one(code, values), factor);
            }
            store<D>(x, job, tile + place<D>(row), inside && write_wide);
        }
    }
}

#define PEERD_KERNELS(CODE, code, DTYPE, dtype)                                                                  \
    extern "C" __global__ void __launch_bounds__(THREADS) peerd_quantize_##code##_##dtype(const Job job) {       \
        __shared__ Shared<CODE> shared;                                                                          \
        quantize<DTYPE, CODE>(job, shared);                                                                      \
    }                                                                                                            \
    extern "C" __global__ void __launch_bounds__(THREADS) peerd_dequantize_##code##_##dtype(const Job job) {     \
        __shared__ Values<CODE> values;                                                                          \
        dequantize<DTYPE, CODE>(job, values);                                                                    \
    }
#define PEERD_SCALES(DTYPE, dtype)                                                                               \
    extern "C" __global__ void __launch_bounds__(THREADS) peerd_scales_##dtype(const Job job) {                  \
        __shared__ Shared<NONE> shared;                                                                          \
        quantize<DTYPE, NONE>(job, shared);                                                                      \
    }
#define PEERD_DTYPES(CODE, code)          \
    PEERD_KERNELS(CODE, code, F32, f32)   \
    PEERD_KERNELS(CODE, code, BF16, bf16) \
    PEERD_KERNELS(CODE, code, F16, f16)

// PEERD_ONLY is the number of a code (its own on the wire), or 0 for the scales: to compile no more than is used.
#if !defined(PEERD_ONLY) || PEERD_ONLY == 16
PEERD_DTYPES(DYNAMIC8, dynamic8)
#endif
#if !defined(PEERD_ONLY) || PEERD_ONLY == 17
PEERD_DTYPES(INT8, int8)
#endif
#if !defined(PEERD_ONLY) || PEERD_ONLY == 18
PEERD_DTYPES(INT4, int4)
#endif
#if !defined(PEERD_ONLY) || PEERD_ONLY == 19
PEERD_DTYPES(NF4, nf4)
#endif
#if !defined(PEERD_ONLY) || PEERD_ONLY == 20
PEERD_DTYPES(E4M3, e4m3)
#endif
#if !defined(PEERD_ONLY) || PEERD_ONLY == 0
PEERD_SCALES(F32, f32)
PEERD_SCALES(BF16, bf16)
PEERD_SCALES(F16, f16)
#endif
